"""The API front. One request passes, in this order:

admission.py  every field is checked, before any worker is called (pure)
prompt.py     text and messages become token ids, once
roll.py       which requests run, and which of them a label names (pure)
fleet.py      which workers are there (pure)
choice.py     one stream from decode: checked, detokenized, cut at stop strings
text.py       tokens to text without half characters and without leaked stop strings (pure)
path.py       the request itself, for every door: deadline, cancel, n answers, outcome
service.py    the gRPC door
operator.py   what operators ask
server.py     all of it behind one port
"""
