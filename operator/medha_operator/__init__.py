"""The operator: reconciles MedhaReplica resources into pods."""
