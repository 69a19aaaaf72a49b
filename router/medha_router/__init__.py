"""The router: the OpenAI HTTP API, tokenising, SSE and the link to replicas."""
