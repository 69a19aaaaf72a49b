// What the pods of the cluster's own tests run, from the standard library alone.
module medha.dev/tests/cluster/pod

go 1.25.0
