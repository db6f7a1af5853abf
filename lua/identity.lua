-- Gives each replica a number that no other one has, and all of them one seed.
--
-- KEYS 1: sorted set of replicas; the score is until when each keeps its number, ms on this server's clock
-- KEYS 2: hash of the replicas' numbers
-- KEYS 3: the seed
-- ARGV 1: the replica that calls
-- ARGV 2: for how long it keeps its number after this call, ms; 0 = it leaves
-- ARGV 3: how many numbers there are, from 0
-- ARGV 4: the number that it would like
-- ARGV 5: the seed that holds if there is none yet
-- Reply: its number, -1 when all are taken or it leaves; the seed
-- TTL: twice that time, at least 2 seconds
-- Cost: O(log n); O(n) of the replicas for one that has no number yet, and for each that is forgotten O(log n)
local lease = tonumber(ARGV[2])
if lease <= 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
  return {-1, redis.call('GET', KEYS[3]) or ''}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local gone = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, 1000)
for _, replica in ipairs(gone) do
  redis.call('ZREM', KEYS[1], replica)
  redis.call('HDEL', KEYS[2], replica)
end
local keep = string.format('%.0f', math.max(2 * lease, 2000))
local number = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or -1)
if number < 0 then
  local taken = {}
  for _, other in ipairs(redis.call('HVALS', KEYS[2])) do
    taken[tonumber(other)] = true
  end
  local count = tonumber(ARGV[3])
  local wanted = tonumber(ARGV[4]) % count
  for step = 0, count - 1 do
    local candidate = (wanted + step) % count
    if not taken[candidate] then
      number = candidate
      break
    end
  end
end
if number >= 0 then
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + lease), ARGV[1])
  redis.call('HSET', KEYS[2], ARGV[1], number)
  redis.call('PEXPIRE', KEYS[1], keep)
  redis.call('PEXPIRE', KEYS[2], keep)
end
redis.call('SET', KEYS[3], ARGV[5], 'NX')
redis.call('PEXPIRE', KEYS[3], keep)
return {number, redis.call('GET', KEYS[3])}
