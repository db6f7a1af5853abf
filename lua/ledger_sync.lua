-- Publishes one member's changed shares, keeps its lease, and says what the others have changed.
--
-- KEYS 1..5: control, leases, pods, changes, channel of one model (see ledger_pods.lua)
-- ARGV 1: '<c8 epoch, c8 nonce, c4 member, I4 flags, I8 sequence, I8 acknowledged, I8 since, I4 lease in ms, I4 limit'
--         flags: 1 = join (the member is told its number; shares are not looked at), 2 = leave;
--         acknowledged: the highest sequence that this server has confirmed; since: the version of the member's view;
--         limit: how many changed pods to return; nonce: the next epoch, should one have to begin
-- ARGV 2: '<c8 pod' and share (absolute) for each pod to publish, at most 1,000
-- ARGV 3: the command that announces: PUBLISH, SPUBLISH, or empty for none
-- Reply: '<I4 status, I4 flags, c8 epoch, c4 member, I4 members, I8 sequence, I8 version, I8 now in ms, I4 expired,
--         I4 changed', then '<c4' for each expired member, then '<c8 pod' and the sum of the others' shares for each
--         changed pod. members and expired are looked up by every eighth call and those that publish nothing or renew the
--         lease; else members is 0. status: 0 done; 1 not a member (any more): join; 2 overtaken by a later call, nothing done.
--         flags: 1 = there is more, ask again; 2 = forget everything seen before this.
-- TTL: all keys 10 minutes, renewed when a third of the lease is over.
-- Cost: O(published + returned) in pods, times log of the pods and times the members with work on them.
local head, blob, announce = ARGV[1], ARGV[2], ARGV[3]
local epoch, nonce, me = sub(head, 1, 8), sub(head, 9, 16), sub(head, 17, 20)
local flags, sequence, acknowledged, since, lease, limit = unpack_struct('<I4I8I8I8I4I4', head, 21)
local join, leave = flags % 2 == 1, flags >= 2
local time, second = now()

local control = redis.call('HMGET', KEYS[1], 'e', 'v', 'n', 'f', me)
local version, floor = tonumber(control[2]), tonumber(control[4])
local record = control[5]
local written, until_ms = 0, 0
if record then
  written, until_ms = unpack_struct('<I8I8', record)
end

local function answer(status, told, members, expired, changes)
  return pack('<I4I4', status, told) .. epoch .. me
    .. pack('<I4I8I8I8I4I4', members, written, version, time, #expired, #changes / 2)
    .. table.concat(expired) .. table.concat(changes)
end

-- Begins a new epoch, and sends the caller to join it.
local function break_off()
  new_epoch(nonce)
  epoch, me, written, version, floor, record = nonce, NOBODY, 0, 0, 0, nil
end

-- A server that took over may have lost the last writes. Then what members have seen never was, and versions come twice.
local lost = control[1] == epoch and not join and record and (acknowledged > written or since > version)
if not control[1] or lost then
  break_off()
elseif join or control[1] ~= epoch then
  epoch = control[1]
  record = nil
end
if join then
  -- A number is never used twice in an epoch. It is spread over 32 bits, so that it seldom looks like a part of a share.
  local number = redis.call('HINCRBY', KEYS[1], 'n', 1)
  if number > 2000000 then
    break_off()
    return answer(1, 0, 0, {}, {})
  end
  me = pack('<I4', number * 2654435761 % 4294967296)
  since, blob, written, until_ms = 0, '', 0, 0
elseif not record then
  me = NOBODY
  return answer(1, 0, 0, {}, {})
elseif #blob > 0 and sequence <= written then
  return answer(2, 0, 0, {}, {})
end

local left = until_ms - time
local renew = join or leave or left * 3 < lease * 2 or left > lease
if renew then
  until_ms = leave and 0 or time + lease
  local added = redis.call('ZADD', KEYS[2], until_ms, me)
  -- Keys can be lost one by one, to eviction. What is left would be wrong for ever.
  local whole = (added == 0 or join) and redis.call('HGET', KEYS[3], 'e') == epoch
    and redis.call('HLEN', KEYS[3]) == redis.call('ZCARD', KEYS[4]) + 1
  if not whole then
    break_off()
    return answer(1, 0, 0, {}, {})
  end
end

-- What the others have changed is looked up before the member's own changes are written: of those it need not be told.
local told = 0
if since < floor then
  since = 0
end
if since == 0 then
  told = 2
end
local pods = pieces(blob, 0, 8, 8 + SHARE)
local own = #pods
local last = since < version and add_changed(pods, since, limit)
local values = #pods > 0 and redis.call('HMGET', KEYS[3], unpack(pods)) or {}
local changes = {}
for i = own + 1, #pods do
  local value = values[i]
  if not value then
    break_off()
    return answer(1, 0, 0, {}, {})
  end
  local sum = others(value, me)
  -- Who knows of nothing need not be told of nothing.
  if since > 0 or sum ~= ZERO then
    changes[#changes + 1] = pods[i]
    changes[#changes + 1] = sum
  end
end
if last then
  told = told + 1
end

if own > 0 then
  for i = #pods, own + 1, -1 do
    pods[i] = nil
  end
  version = write(epoch, pods, pieces(blob, 8, SHARE, 8 + SHARE), values, me, version, second, me, announce)
  written = sequence
end
if own > 0 or renew then
  redis.call('HSET', KEYS[1], 'v', string.format('%.0f', version), me,
    pack('<I8I8', written, until_ms) .. (record and sub(record, 17) or ''))
end

if renew then
  renew_ttl()
  -- A few pods that nobody has worked on for a minute leave, at another place each time. The last one stays, and with it
  -- the key and its TTL.
  local size = redis.call('ZCARD', KEYS[4]) - 1
  if size > 0 then
    local from = time % size
    local old = redis.call('ZRANGE', KEYS[4], from, math.min(from + 7, size - 1))
    local found = redis.call('HMGET', KEYS[3], unpack(old))
    local gone = {}
    for i = 1, #old do
      local last, _, _, at = unpack_struct('<I8I8c4I4', found[i] or EMPTY)
      if found[i] and #found[i] == TOP and at + 60 < second then
        gone[#gone + 1] = old[i]
        floor = math.max(floor, last)
      end
    end
    if #gone > 0 then
      redis.call('HDEL', KEYS[3], unpack(gone))
      redis.call('ZREM', KEYS[4], unpack(gone))
      redis.call('HSET', KEYS[1], 'f', string.format('%.0f', floor))
    end
  end
end

-- The dead are looked for now and then by who is busy, each time by who is not.
local expired, members = {}, 0
if own == 0 or renew or sequence % 8 == 0 then
  expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', time, 'LIMIT', 0, 8)
  members = redis.call('ZCARD', KEYS[2])
end
-- The member knows of its own changes, so its view is that of the version after them.
version = last or version
return answer(0, told, members, expired, changes)
