-- Remembers the size of a session's last prompt, and says what it was before.
--
-- KEYS 1: string of one session: prompt tokens in decimal
-- ARGV 1: prompt tokens now
-- ARGV 2: how long an idle session is remembered, in ms
-- Reply: the prompt tokens before, or nil for a session that is not known
-- TTL: ARGV 2, from the last call on
-- Cost: O(1)
local before = redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return before and tonumber(before) or nil
