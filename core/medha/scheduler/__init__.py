"""What a replica runs next: admission, order, and the filling of steps."""
