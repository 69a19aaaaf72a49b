// Modules whose folders hold definitions of others' resources, which tests install: nothing is compiled.
module medha.dev/tests/cluster/definitions

go 1.26.0

require (
	github.com/prometheus-operator/prometheus-operator v0.85.0
	sigs.k8s.io/gateway-api v1.4.0
)
