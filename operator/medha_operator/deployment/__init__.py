"""A MedhaDeployment: the observed state of its replicas, and the plan that rolls them out."""
