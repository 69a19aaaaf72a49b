"""The router: the OpenAI HTTP door, tokenising, SSE and the link to replicas."""
