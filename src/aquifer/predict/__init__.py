"""How long outputs will be: forecasts before a request has begun, and what they are made of."""
