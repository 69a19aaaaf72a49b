//go:build tools

// Package tools names the commands that are built, so that go.sum holds what they need.
package tools

import (
	_ "github.com/kedacore/keda/v2/cmd/adapter"
	_ "github.com/kedacore/keda/v2/cmd/operator"
)
