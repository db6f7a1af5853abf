-- Commits a charge if nothing that the decision rested on has changed; says what has changed in any case.
--
-- KEYS 1..5: control, leases, pods, changes, channel of one model (see ledger_pods.lua)
-- ARGV 1: '<c8 epoch, c4 member, I8 sequence, I8 since, I4 limit'; the sequence names the grant: the same claim sent
--         twice is granted once and answered twice; since: the version of the view that the decision was made on
-- ARGV 2: '<c8 pod' and the member's share (absolute, with the charge) for each pod that is charged
-- ARGV 3: the pods that the decision rested on, 8 bytes each; empty: on every pod
-- ARGV 4: the command that announces: PUBLISH, SPUBLISH, or empty for none
-- Reply: '<I4 status, I4 flags, I8 version, I8 now in ms, I4 changed', then '<c8 pod' and the sum of the others' shares for
--         each pod that changed after `since`. status: 0 granted; 1 something is wrong that
--         a sync will find out; 2 overtaken by a later
--         call, nothing done; 3 not granted, decide again. flags: 1 = there is more than `limit`.
-- TTL: unchanged; the member's lease is kept by ledger_sync.lua
-- Cost: O(claimed + returned + rested on) in pods, times log of the pods and times the members with work on them.
local GRANTS = 8
local epoch, me, sequence, since, limit = unpack_struct('<c8c4I8I8I4', ARGV[1])
local blob, announce = ARGV[2], ARGV[4]
local time, second = now()
local control = redis.call('HMGET', KEYS[1], 'e', 'v', 'f', me)
local version, record = tonumber(control[2]), control[4]

local function answer(status, told, seen, changes)
  return pack('<I4I4I8I8I4', status, told, seen, time, #changes / 2) .. table.concat(changes)
end

if control[1] ~= epoch or not record or since > version then
  return answer(1, 0, 0, {})
end
local written = unpack_struct('<I8', record)
local grant = pack('<I8', sequence)
local repeated = false
if sequence <= written then
  for at = 17, #record, 8 do
    repeated = repeated or sub(record, at, at + 7) == grant
  end
  if not repeated then
    return answer(2, 0, since, {})
  end
end

local rested = {}
for _, pod in ipairs(pieces(ARGV[3], 0, 8, 8)) do
  rested[pod] = true
end
local all = ARGV[3] == ''
local pods = pieces(blob, 0, 8, 8 + SHARE)
local own = #pods
local cut = since < version and add_changed(pods, since, limit)
local values = redis.call('HMGET', KEYS[3], unpack(pods))
local seen, told = cut or version, cut and 1 or 0
-- After a pruning, changes may be missing from the list.
local conflict = cut or since < tonumber(control[3])
local changes = {}
for i = own + 1, #pods do
  if not values[i] then
    return answer(1, 0, 0, {})
  end
  local last, other, who = unpack_struct('<I8I8c4', values[i])
  if who == me then
    last = other
  end
  if last > since then
    conflict = conflict or all or rested[pods[i]]
    changes[#changes + 1] = pods[i]
    changes[#changes + 1] = others(values[i], me)
  end
end
if repeated then
  return answer(0, told, seen, changes)
end
if conflict then
  return answer(3, told, seen, changes)
end

for i = #pods, own + 1, -1 do
  pods[i] = nil
end
version = write(epoch, pods, pieces(blob, 8, SHARE, 8 + SHARE), values, me, version, second, me, announce)
redis.call('HSET', KEYS[1], 'v', string.format('%.0f', version), me,
  pack('<I8', sequence) .. sub(record, 9, 16) .. grant .. sub(record, 17, 8 + 8 * GRANTS))
-- The member knows of its own change, so its view is that of the version after it.
return answer(0, 0, version, changes)
