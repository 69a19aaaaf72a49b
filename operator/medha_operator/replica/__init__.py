"""One MedhaReplica: what is observed of it, what it should consist of, and the plan between the two."""
