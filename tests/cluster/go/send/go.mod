// A client of the API server that does nothing but send, from the standard library alone.
module medha.dev/tests/cluster/send

go 1.25.0
