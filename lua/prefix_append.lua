-- Tells the other replicas what this one found out (which blocks of prompts a pod now has, sizes of sessions, pods that fail):
-- appends to a capped stream that they follow.
--
-- KEYS 1: the stream; field d = an update, opaque to this script
-- ARGV 1: entries to keep, about: whole nodes of the stream leave at once
-- ARGV 2: how long the stream outlives its last update, in ms
-- ARGV 3..: updates, at most 64
-- Reply: the id of the last entry
-- TTL: ARGV 2, renewed with each call
-- Cost: O(updates); what leaves at the other end was paid for when it came
local last
for at = 3, #ARGV do
  last = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'd', ARGV[at])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return last
