"""The scheduler of a replica: admission, order, and the filling of steps."""
