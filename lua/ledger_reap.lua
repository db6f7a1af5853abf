-- Takes the shares of a member whose lease is over out of the sums. Each share leaves once: with its pod's entry.
--
-- KEYS 1..5: control, leases, pods, changes, channel of one model (see ledger_pods.lua)
-- ARGV 1: '<c8 epoch, c4 member, I8 cursor, I4 limit'; cursor 0 at first, then what the last reply said
-- ARGV 2: the command that announces: PUBLISH, SPUBLISH, or empty for none
-- Reply: '<I4 status, I8 cursor, I4 shares that left'. status: 0 done, the member is gone; 1 not yet, call again with that
--         cursor; 2 nothing done: it lives, or nobody knows it, or the epoch is another one
-- TTL: unchanged
-- Cost: O(limit), times log of the pods and times the members with work on them. A whole reap walks all pods once; it
--         happens once per death, in steps between which others are served.
local epoch, member, cursor, limit = unpack_struct('<c8c4I8I4', ARGV[1])
local time, second = now()
local control = redis.call('HMGET', KEYS[1], 'e', 'v', member)
local ends = redis.call('ZSCORE', KEYS[2], member)
if control[1] ~= epoch or not ends or tonumber(ends) > time then
  return pack('<I4I8I4', 2, 0, 0)
end
local version = tonumber(control[2])
if control[3] then
  -- From here on its calls are those of a stranger. The lease goes last, so that somebody else can go on with this.
  redis.call('HDEL', KEYS[1], member)
  if unpack_struct('<I8', control[3]) == 0 then
    -- It never published.
    redis.call('ZREM', KEYS[2], member)
    return pack('<I4I8I4', 0, 0, 0)
  end
end

local pods = {}
local last = add_changed(pods, cursor, limit)
local left = 0
if #pods > 0 then
  local values = redis.call('HMGET', KEYS[3], unpack(pods))
  version, left = write(epoch, pods, nil, values, member, version, second, NOBODY, ARGV[2])
  if left > 0 then
    redis.call('HSET', KEYS[1], 'v', string.format('%.0f', version))
  end
end
if last then
  return pack('<I4I8I4', 1, last, left)
end
redis.call('ZREM', KEYS[2], member)
return pack('<I4I8I4', 0, 0, left)
