"""The half that runs next to the model: it copies, seals and checks. It decides nothing and never calls the server."""
