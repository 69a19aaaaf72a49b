//go:build tools

// Package tools names the commands that are built beside servers/, so that go.sum holds what they need.
package tools

import (
	_ "github.com/zegl/kube-score/cmd/kube-score"
	_ "helm.sh/helm/v3/cmd/helm"
	_ "k8s.io/kubernetes/cmd/kubectl"
	_ "sigs.k8s.io/kwok/cmd/kwok"
)
