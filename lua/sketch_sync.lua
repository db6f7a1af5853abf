-- Shares what replicas observe (lengths of prompts, by bins): each batch is told to every replica once.
--
-- The batches stand in a stream, by the time of their arrival. Readers add them up, whole numbers in any order, and let old
-- ones count less; who comes late reads what still counts.
-- KEYS 1: the stream; fields r = replica, d = batch, opaque to this script
-- KEYS 2: hash; replica -> '<I8 sequence, I8 ms' of its last batch
-- ARGV 1: replica, 8 bytes
-- ARGV 2: sequence of the batch, grows with each; a batch that comes again is not added again
-- ARGV 3: the batch, or empty to read only
-- ARGV 4: id of the last entry that was read, or - to begin
-- ARGV 5: entries to return
-- ARGV 6: how long batches are kept, in ms
-- Reply: {1 added or 0 not, now in ms, id to go on from, id, batch, id, batch, ...}: the batches of the others. Whoever gets
--        another id to go on from than it gave may ask again at once.
-- TTL: ARGV 6, renewed with each batch
-- Cost: O(entries returned); what is too old was paid for when it came
local replica, sequence, batch, after = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local keep = tonumber(ARGV[6])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local added = 0
if batch ~= '' then
  local last = redis.call('HGET', KEYS[2], replica)
  if not last or struct.unpack('<I8', last) < sequence then
    local oldest = string.format('%.0f', math.max(now - keep, 0))
    redis.call('XADD', KEYS[1], 'MINID', '~', oldest, '*', 'r', replica, 'd', batch)
    redis.call('HSET', KEYS[2], replica, struct.pack('<I8I8', sequence, now))
    added = 1
    -- Replicas that are long gone leave, by and by.
    local some = redis.call('HRANDFIELD', KEYS[2], 2, 'WITHVALUES')
    for at = 1, #some, 2 do
      local _, seen = struct.unpack('<I8I8', some[at + 1])
      if seen + keep < now then
        redis.call('HDEL', KEYS[2], some[at])
      end
    end
    redis.call('PEXPIRE', KEYS[1], keep)
    redis.call('PEXPIRE', KEYS[2], keep)
  end
end

local from = after == '-' and string.format('%.0f', math.max(now - keep, 0)) or '(' .. after
local reply = { added, now, after }
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', ARGV[5])) do
  reply[3] = entry[1]
  if entry[2][2] ~= replica then
    reply[#reply + 1] = entry[1]
    reply[#reply + 1] = entry[2][4]
  end
end
return reply
