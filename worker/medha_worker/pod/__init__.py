"""The supervisor of one pod of a replica: it starts the parts of the pod and watches them."""
