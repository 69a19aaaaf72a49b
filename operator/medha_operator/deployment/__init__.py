"""One MedhaDeployment: what is observed of its replicas, and the plan that rolls them out."""
