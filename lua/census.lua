-- Counts the replicas that are alive.
--
-- KEYS 1: sorted set of replicas; the score is when each was last heard of, ms on this server's clock
-- ARGV 1: the replica that calls
-- ARGV 2: for how long a replica counts after its last call, ms; 0 = this one leaves
-- Reply: how many there are
-- TTL: twice that time, at least 2 seconds
-- Cost: O(log n), and O(log n) for each that is forgotten
local lease = tonumber(ARGV[2])
if lease <= 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
  return redis.call('ZCARD', KEYS[1])
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - lease))
redis.call('PEXPIRE', KEYS[1], math.max(2 * lease, 2000))
return redis.call('ZCARD', KEYS[1])
