-- Functions over one model's ledger. This text stands in front of ledger_sync.lua, ledger_reap.lua and claim.lua.
--
-- KEYS 1 control: hash; e = epoch (8 bytes), v = version (counts the calls
--        that changed something), n = members that ever joined, f = highest version of a pruned pod,
--        and per member (number, 4 bytes): '<I8 sequence, I8 end of lease in ms', then the sequences of its last grants
-- KEYS 2 leases: sorted set; member number -> end of its lease in ms on the clock of this server
-- KEYS 3 pods: hash; e = epoch; pod (8 bytes) -> head, sum, entries (below)
-- KEYS 4 changes: sorted set; pod -> version of its last change
-- KEYS 5 channel on which changes are announced
-- ARGV: see the scripts. Numbers are packed little-endian in fixed width. Epochs and pods are 8 bytes that nobody
--       computes with, since a double holds integers exactly to 2^53 only.
-- A pod: head '<I8 version, I8 version of the last change by another member than the last one, c4 last member,
--       I4 second of the last change', sum of the entries, entries of '<c4 member' and share.
-- A share: '<I4I4I4I4I8I8I8I8' running, pending, prefills, decode charges, decode tokens, sum of their starts in ms,
--       prefill tokens, KV tokens.
-- Reply: see the scripts.
-- TTL: every key 10 minutes, renewed with a lease, and when a new epoch begins.
-- Cost: a constant number of commands per call; work grows with the pods that are named or have changed, each with the
--       number of members that have work on it.
local SHARE, ENTRY, HEAD, TOP = 48, 52, 24, 72
local FORMAT, DIFFERENCE = '<I4I4I4I4I8I8I8I8', '<i4i4i4i4i8i8i8i8'
local VALUE = '<I8I8c4I4I4I4I4I4I8I8I8I8'
local ZERO, EMPTY = string.rep('\0', SHARE), string.rep('\0', TOP)
local NOBODY = '\0\0\0\0'
local TTL = 600000
-- Above this many pods an announcement says only that something has changed.
local ANNOUNCED = 64
local pack, unpack_struct, sub = struct.pack, struct.unpack, string.sub

local function now()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000), tonumber(time[1])
end

local function renew_ttl()
  for key = 1, 4 do
    redis.call('PEXPIRE', KEYS[key], TTL)
  end
end

-- Forgets everything: nobody is a member any more, and whoever was will be told so.
local function new_epoch(epoch)
  redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
  redis.call('HSET', KEYS[1], 'e', epoch, 'v', 0, 'n', 0, 'f', 0)
  redis.call('HSET', KEYS[3], 'e', epoch)
  renew_ttl()
end

-- Where the member's share begins in a pod's value.
local function find(value, member)
  local at = TOP + 1
  while true do
    at = string.find(value, member, at, true)
    if not at then
      return
    elseif (at - TOP - 1) % ENTRY == 0 then
      return at + 4
    end
    at = at + 1
  end
end

-- The sum over all members but one.
local function others(value, member)
  local at = find(value, member)
  if not at then
    return sub(value, HEAD + 1, TOP)
  end
  local s1, s2, s3, s4, s5, s6, s7, s8 = unpack_struct(FORMAT, value, HEAD + 1)
  local o1, o2, o3, o4, o5, o6, o7, o8 = unpack_struct(FORMAT, value, at)
  return pack(FORMAT, s1 - o1, s2 - o2, s3 - o3, s4 - o4, s5 - o5, s6 - o6, s7 - o7, s8 - o8)
end

-- Replaces the member's share of each of the pods: `shares` has one share per pod, or is nil to take them all away;
-- `values` are the pods' present values, `author` who is named as the last to change them. Returns the version after that
-- (one more, if anything has changed) and the number of changed pods. The differences go to whoever listens, unless there
-- are too many of them.
local function write(epoch, pods, shares, values, member, version, second, author, announce)
  local loud = announce ~= ''
  local to = version + 1
  local score = string.format('%.0f', to)
  local fields, scores, news, next = { KEYS[3] }, { KEYS[4] }, {}, 0
  for i = 1, #pods do
    local pod, value, share = pods[i], values[i] or EMPTY, shares and shares[i] or ZERO
    local at = find(value, member)
    local old = at and sub(value, at, at + SHARE - 1) or ZERO
    if old ~= share then
      local last, other, who, _, s1, s2, s3, s4, s5, s6, s7, s8 = unpack_struct(VALUE, value)
      local n1, n2, n3, n4, n5, n6, n7, n8 = unpack_struct(FORMAT, share)
      local entries
      if at then
        local o1, o2, o3, o4, o5, o6, o7, o8 = unpack_struct(FORMAT, old)
        n1, n2, n3, n4, n5, n6, n7, n8 = n1 - o1, n2 - o2, n3 - o3, n4 - o4, n5 - o5, n6 - o6, n7 - o7, n8 - o8
        if share == ZERO then
          entries = sub(value, TOP + 1, at - 5) .. sub(value, at + SHARE)
        else
          entries = sub(value, TOP + 1, at - 1) .. share .. sub(value, at + SHARE)
        end
      else
        entries = sub(value, TOP + 1) .. member .. share
      end
      local top = pack(VALUE, to, who == author and other or last, author, second,
        s1 + n1, s2 + n2, s3 + n3, s4 + n4, s5 + n5, s6 + n6, s7 + n7, s8 + n8)
      next = next + 2
      fields[next], fields[next + 1] = pod, top .. entries
      scores[next], scores[next + 1] = score, pod
      if loud and next <= 2 * ANNOUNCED then
        news[next - 1], news[next] = pod, pack(DIFFERENCE, n1, n2, n3, n4, n5, n6, n7, n8)
      end
    end
  end
  if next == 0 then
    return version, 0
  end
  redis.call('HSET', unpack(fields))
  redis.call('ZADD', unpack(scores))
  if version == 0 then
    -- The first change of an epoch makes this key.
    redis.call('PEXPIRE', KEYS[4], TTL)
  end
  if loud then
    redis.call(announce, KEYS[5],
      epoch .. pack('<I8', to) .. member .. (next <= 2 * ANNOUNCED and table.concat(news) or ''))
  end
  return to, next / 2
end

-- Cuts a string into pieces of `width` bytes, each of which begins `first` bytes into its place of `step` bytes.
local function pieces(text, first, width, step)
  local found = {}
  for at = 1 + first, #text, step do
    found[#found + 1] = sub(text, at, at + width - 1)
  end
  return found
end

-- Appends to `pods` those that have changed after version `since`, in the order of their changes: at most `limit`, and what
-- else belongs to the last one's version. Returns that version, or nil when there are no more.
local function add_changed(pods, since, limit)
  limit = math.max(limit, 1)
  local after = '(' .. string.format('%.0f', since)
  local found = redis.call('ZRANGEBYSCORE', KEYS[4], after, '+inf', 'LIMIT', 0, limit + 1)
  local last
  if #found > limit then
    last = redis.call('ZSCORE', KEYS[4], found[limit])
    found = redis.call('ZRANGEBYSCORE', KEYS[4], after, last)
  end
  for i = 1, #found do
    pods[#pods + 1] = found[i]
  end
  return last and tonumber(last)
end
