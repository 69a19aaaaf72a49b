//go:build tools

// Package tools names the command that is built, so that go.sum holds what it needs.
package tools

import _ "sigs.k8s.io/prometheus-adapter/cmd/adapter"
