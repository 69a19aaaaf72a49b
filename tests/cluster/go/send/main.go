// Send reads calls, one JSON object a line, sends them over as many connections as asked for, and says how long that
// took: `send URL CA CERTIFICATE KEY CONNECTIONS <calls`. It is what an operator could reach at best.
package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"
)

type call struct {
	Method string          `json:"method"`
	Path   string          `json:"path"`
	Type   string          `json:"type"`
	Body   json.RawMessage `json:"body"`
}

type result struct {
	Seconds float64 `json:"seconds"`
	Sent    int     `json:"sent"`
	Failed  int     `json:"failed"`
	Error   string  `json:"error"`
}

func main() {
	if len(os.Args) != 6 {
		fail(fmt.Errorf("usage: send URL CA CERTIFICATE KEY CONNECTIONS <calls"))
	}
	connections, err := strconv.Atoi(os.Args[5])
	if err != nil {
		fail(err)
	}
	client, err := newClient(os.Args[2], os.Args[3], os.Args[4], connections)
	if err != nil {
		fail(err)
	}
	calls, err := read(os.Stdin)
	if err != nil {
		fail(err)
	}
	json.NewEncoder(os.Stdout).Encode(sendAll(client, os.Args[1], calls, connections))
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func newClient(authority, certificate, key string, connections int) (*http.Client, error) {
	pair, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		return nil, err
	}
	pem, err := os.ReadFile(authority)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	transport := &http.Transport{
		TLSClientConfig:     &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots},
		MaxConnsPerHost:     connections,
		MaxIdleConnsPerHost: connections,
	}
	return &http.Client{Transport: transport, Timeout: time.Minute}, nil
}

func read(from io.Reader) ([]call, error) {
	var calls []call
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var next call
		if err := json.Unmarshal(lines.Bytes(), &next); err != nil {
			return nil, err
		}
		calls = append(calls, next)
	}
	return calls, lines.Err()
}

func sendAll(client *http.Client, url string, calls []call, connections int) result {
	waiting := make(chan call, len(calls))
	for _, next := range calls {
		waiting <- next
	}
	close(waiting)
	total := result{Sent: len(calls)}
	var guard sync.Mutex
	var workers sync.WaitGroup
	began := time.Now()
	for range connections {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for next := range waiting {
				if err := send(client, url, next); err != nil {
					guard.Lock()
					total.Failed++
					total.Error = err.Error()
					guard.Unlock()
				}
			}
		}()
	}
	workers.Wait()
	total.Seconds = time.Since(began).Seconds()
	return total
}

func send(client *http.Client, url string, next call) error {
	request, err := http.NewRequest(next.Method, url+next.Path, bytes.NewReader(next.Body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", next.Type)
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %d %s", next.Method, next.Path, answer.StatusCode, body)
	}
	return err
}
