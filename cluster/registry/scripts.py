"""What the Redis server does in one step: Lua, run whole or not at all. Pure texts.

Time is the server's own, so that hosts with different clocks agree on what has run out.
"""

from __future__ import annotations

_NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
"""

# KEYS workers or gateways (hash: id -> JSON), expiry (sorted set: id by the time it goes)
# ARGV id, JSON, ttl_ms, incarnation, started_ms, most records. Returns 1 kept, 0 superseded, -1 full.
PUT_RECORD = (
    _NOW
    + """
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
local kept = redis.call('HGET', KEYS[1], ARGV[1])
if kept then
  local ok, old = pcall(cjson.decode, kept)
  if ok and type(old) == 'table' and old.incarnation ~= ARGV[4]
      and type(old.started_ms) == 'number' and old.started_ms > tonumber(ARGV[5]) then
    return 0
  end
elseif redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[6]) then
  return -1
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[1])
local last = tonumber(redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2])
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', last + 60000))
redis.call('PEXPIREAT', KEYS[2], string.format('%.0f', last + 60000))
return 1
"""
)

# KEYS workers, expiry; ARGV id, incarnation
REMOVE_WORKER = """
local kept = redis.call('HGET', KEYS[1], ARGV[1])
if not kept then return 0 end
local ok, old = pcall(cjson.decode, kept)
if ok and type(old) == 'table' and old.incarnation ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""

# KEYS workers or gateways, expiry. Returns the JSON of all that have not run out.
RECORDS = (
    _NOW
    + """
local out = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. string.format('%.0f', now), '+inf')) do
  local text = redis.call('HGET', KEYS[1], id)
  if text then out[#out + 1] = text end
end
return out
"""
)

# KEYS desired (hash: revision, state, writer); ARGV expected, carried, JSON, writer.
# Returns {1 or 0, the revision that is kept now}. The same writer twice is one change: its first answer was lost.
# The new revision is above all that are told and, since a flush forgets the stored one, above the time in milliseconds.
REPLACE_DESIRED = (
    _NOW
    + """
local kept = redis.call('HMGET', KEYS[1], 'revision', 'writer')
local current = tonumber(kept[1] or '0') or 0
if kept[2] == ARGV[4] then return {1, string.format('%.0f', current)} end
if current ~= tonumber(ARGV[1]) then return {0, string.format('%.0f', current)} end
local revision = string.format('%.0f', math.max(current, tonumber(ARGV[1]), tonumber(ARGV[2]), now) + 1)
redis.call('HSET', KEYS[1], 'revision', revision, 'state', ARGV[3], 'writer', ARGV[4])
return {1, revision}
"""
)

# KEYS events or decisions (stream); ARGV record, writer, most records. Returns the sequence number: above the last one
# and, since a flush forgets that, not below the time in milliseconds.
APPEND = (
    _NOW
    + """
local last = 0
for i, entry in ipairs(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 16)) do
  local number = string.match(entry[1], '^(%d+)-')
  if entry[2][4] == ARGV[2] then return number end
  if i == 1 then last = tonumber(number) end
end
local sequence = string.format('%.0f', math.max(last + 1, now))
redis.call('XADD', KEYS[1], 'MAXLEN', '=', ARGV[3], sequence .. '-0', 'event', ARGV[1], 'writer', ARGV[2])
return sequence
"""
)

# KEYS answer; ARGV answer, ttl_ms. Returns the earlier answer, or nil.
REMEMBER = """
local kept = redis.call('GET', KEYS[1])
if kept then return kept end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return false
"""
