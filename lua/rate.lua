-- Limits requests per window: looks and charges in one step, and gives back what was not used.
--
-- KEYS 1: hash of one limit; w = the window that is counted, n = what was charged in it
-- ARGV 1: what to do: charge, or refund
-- ARGV 2: how much
-- ARGV 3: charge: the limit; a charge that would exceed it is refused whole. refund: the window that was charged
-- ARGV 4: length of the window in ms
-- Reply: charge: {1 granted or 0 refused, window, charged in it by now, ms until it ends};
--        refund: {1 given back or 0 the window is over, window, charged in it by now, ms until it ends}
-- TTL: two windows, at least 2 seconds
-- Cost: O(1)
local amount, length = tonumber(ARGV[2]), math.max(tonumber(ARGV[4]), 1)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local window = math.floor(now / length)
local left = (window + 1) * length - now
local held = redis.call('HMGET', KEYS[1], 'w', 'n')
local charged = tonumber(held[1]) == window and tonumber(held[2]) or 0

if ARGV[1] == 'charge' then
  if charged + amount > tonumber(ARGV[3]) then
    return { 0, window, charged, left }
  end
  charged = charged + amount
elseif tonumber(ARGV[3]) ~= window or tonumber(held[1]) ~= window then
  return { 0, window, charged, left }
else
  charged = math.max(charged - amount, 0)
end
redis.call('HSET', KEYS[1], 'w', string.format('%.0f', window), 'n', string.format('%.0f', charged))
redis.call('PEXPIRE', KEYS[1], math.max(2 * length, 2000))
return { 1, window, charged, left }
