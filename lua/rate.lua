-- Limits requests per window: looks at every limit of a request and charges all of them in one step, or none, and gives
-- back what was not used.
--
-- KEYS 1 to n: hash of one limit each, in the order in which they are looked at, all of one slot; w = the window that is
--              counted, n = what was charged in it
-- ARGV 1: what to do: charge, or refund
-- ARGV 2, 3, 4 (and so on, three for each key): how much (charge: 0 = look only); charge: the limit, which refuses when it
--              is reached, or would be exceeded; refund: the window that was charged; length of the window in ms
-- Reply: {0 = done; charge: else the number of the first limit that refuses, and nothing was charged; refund: else that of
--        the first whose window is over, and the others were given back; then three for each key: window, charged in it by
--        now, ms until it ends}
-- TTL: two windows, at least 2 seconds
-- Cost: O(n)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local charge = ARGV[1] == 'charge'
local limits, stopped = {}, 0
for i, key in ipairs(KEYS) do
  local amount, bound = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  local length = math.max(tonumber(ARGV[3 * i + 1]), 1)
  local window = math.floor(now / length)
  local held = redis.call('HMGET', key, 'w', 'n')
  local current = tonumber(held[1]) == window
  local charged = current and tonumber(held[2]) or 0
  local over
  if charge then
    over = charged + math.max(amount, 1) > bound
  else
    over = not current or bound ~= window
  end
  if over and stopped == 0 then
    stopped = i
  end
  limits[i] = { key, amount, length, window, charged, over }
end

local reply = { stopped }
for i, limit in ipairs(limits) do
  local key, amount, length, window, charged, over = unpack(limit)
  local write
  if charge then
    write = stopped == 0 and amount > 0
    if write then
      charged = charged + amount
    end
  else
    write = not over
    if write then
      charged = math.max(charged - amount, 0)
    end
  end
  if write then
    redis.call('HSET', key, 'w', string.format('%.0f', window), 'n', string.format('%.0f', charged))
    redis.call('PEXPIRE', key, math.max(2 * length, 2000))
  end
  reply[3 * i - 1], reply[3 * i], reply[3 * i + 1] = window, charged, (window + 1) * length - now
end
return reply
