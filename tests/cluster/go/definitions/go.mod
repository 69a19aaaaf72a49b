// Modules whose folders hold definitions of others' resources, which tests install: nothing is compiled.
module medha.dev/tests/cluster/definitions

go 1.26.0

require (
	github.com/kedacore/keda/v2 v2.21.0
	github.com/prometheus-operator/prometheus-operator v0.85.0
	sigs.k8s.io/gateway-api v1.4.0
	sigs.k8s.io/gateway-api-inference-extension v1.6.0
)
