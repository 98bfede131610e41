"""The OpenAI-compatible HTTP API, a second door to the gateway's request path.

fields.py     JSON fields by type (pure)
requests.py   a JSON body becomes the request message that gRPC has, or a typed refusal (pure)
replies.py    response messages become JSON objects (pure)
errors.py     typed errors become HTTP statuses and OpenAI's error objects (pure)
call.py       one request: its body, its answer, its end
app.py        the routes
connection.py limits of one connection
server.py     all of it behind one port
"""
