//! What is told once to everybody: batches of observations, and findings (prefixes, sessions, pods that fail).

use std::time::Duration;

use bytes::Bytes;
use fred::interfaces::ClientLike;
use fred::types::{ClusterHash, CustomCommand, Value};

use super::counters::unreadable;
use super::{Plane, RedisError, bytes, failure, options};
use crate::state::keys::ModelKeys;
use crate::state::scripts;

/// A place in a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamId(Option<String>);

impl StreamId {
    /// Before everything that is kept.
    pub const START: StreamId = StreamId(None);

    /// When the entry was written, in ms since the Unix epoch on the server's clock.
    pub fn written_ms(&self) -> Option<u64> {
        self.0.as_ref()?.split('-').next()?.parse().ok()
    }

    fn read(value: &Value) -> Option<StreamId> {
        Some(StreamId(Some(value.as_string().filter(|id| id != "-")?)))
    }
}

/// One call of `sketch_sync.lua`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SketchCall {
    /// This process.
    pub replica: [u8; 8],
    /// Grows with each batch.
    pub sequence: u64,
    /// What was observed since the last batch; empty = nothing.
    pub batch: Vec<u8>,
    /// Up to where was read.
    pub after: StreamId,
    /// Entries to read.
    pub limit: u32,
    /// How long batches are kept.
    pub keep: Duration,
}

/// Its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SketchReply {
    /// The batch was added by this call, and not by one before.
    pub added: bool,
    /// The server's clock, in ms since the Unix epoch.
    pub now_ms: u64,
    /// Where to go on.
    pub after: StreamId,
    /// The others' batches, with their ids.
    pub batches: Vec<(StreamId, Bytes)>,
}

/// What a reader of a stream got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Following {
    /// Where to go on.
    pub after: StreamId,
    /// The entries.
    pub entries: Vec<Bytes>,
}

impl Plane {
    /// `sketch_sync.lua` on the sketch called `name`.
    pub async fn sketch_sync(
        &self,
        keys: &ModelKeys,
        name: &str,
        call: &SketchCall,
        deadline: Duration,
    ) -> Result<SketchReply, RedisError> {
        let [batches, seen] = keys.sketch(name);
        let arguments = [
            call.replica.to_vec(),
            call.sequence.to_string().into_bytes(),
            call.batch.clone(),
            call.after.0.as_deref().unwrap_or("-").into(),
            call.limit.max(1).to_string().into_bytes(),
            call.keep.as_millis().max(1).to_string().into_bytes(),
        ];
        let reply = self.call(scripts::SKETCH_SYNC, &[&batches, &seen], &arguments, deadline).await?;
        let Value::Array(fields) = reply else { return Err(unreadable()) };
        let [added, now, after, entries @ ..] = &fields[..] else { return Err(unreadable()) };
        let mut batches = Vec::with_capacity(entries.len() / 2);
        for entry in entries.chunks(2) {
            let [id, batch] = entry else { return Err(unreadable()) };
            batches.push((StreamId::read(id).ok_or_else(unreadable)?, bytes(batch.clone())?));
        }
        Ok(SketchReply {
            added: added.as_u64() == Some(1),
            now_ms: now.as_u64().ok_or_else(unreadable)?,
            after: StreamId::read(after).unwrap_or_default(),
            batches,
        })
    }

    /// `prefix_append.lua`: at most 64 updates, of which about `keep` stay, for `ttl` after the last one.
    pub async fn prefix_append(
        &self,
        keys: &ModelKeys,
        updates: &[Vec<u8>],
        keep: u64,
        ttl: Duration,
        deadline: Duration,
    ) -> Result<(), RedisError> {
        let mut arguments = vec![keep.to_string().into_bytes(), ttl.as_millis().max(1).to_string().into_bytes()];
        arguments.extend(updates.iter().take(64).cloned());
        self.call(scripts::PREFIX_APPEND, &[&keys.prefix()], &arguments, deadline).await?;
        Ok(())
    }

    /// Reads at most `count` updates that came after `after`.
    pub async fn prefix_read(
        &self,
        keys: &ModelKeys,
        after: &StreamId,
        count: u32,
        deadline: Duration,
    ) -> Result<Following, RedisError> {
        let from = after.0.as_ref().map_or_else(|| "-".to_owned(), |id| format!("({id}"));
        let words: Vec<Value> =
            vec![keys.prefix().into(), from.into(), "+".into(), "COUNT".into(), i64::from(count).into()];
        let command = CustomCommand::new_static("XRANGE", ClusterHash::FirstKey, false);
        let client = self.client.with_options(&options(deadline));
        let reply = client.custom(command, words);
        let reply: Value = match tokio::time::timeout(deadline, reply).await {
            Err(_) => return Err(RedisError::Late),
            Ok(reply) => reply.map_err(|error| failure(&error))?,
        };
        let Value::Array(found) = reply else { return Err(unreadable()) };
        let mut following = Following { after: after.clone(), entries: Vec::with_capacity(found.len()) };
        for entry in found {
            let Value::Array(parts) = entry else { return Err(unreadable()) };
            let [id, Value::Array(fields)] = &parts[..] else { return Err(unreadable()) };
            let [_, update] = &fields[..] else { return Err(unreadable()) };
            following.after = StreamId::read(id).ok_or_else(unreadable)?;
            following.entries.push(bytes(update.clone())?);
        }
        Ok(following)
    }
}
