"""A MedhaReplica: its observed state, its objects, and the plan that leads from one to the other."""
