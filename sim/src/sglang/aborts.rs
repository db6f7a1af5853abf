//! `/abort_request`, and the request ids it looks at.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

use super::call::Api;
use super::failure::Failure;
use crate::answer::Reply;
use crate::body::Fields;
use crate::report::ViolationKind;
use crate::state::Core;

#[derive(Debug, Default)]
struct Table {
    live: HashMap<u64, (String, CancellationToken)>,
    next: u64,
}

/// The `rid` of each live sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rids {
    table: Arc<Mutex<Table>>,
}

impl Rids {
    /// A sequence lives under `rid` until the guard drops. Also says whether another one already does.
    pub fn enter(&self, rid: &str, abort: CancellationToken) -> (Live, bool) {
        let mut table = self.lock();
        let shared = table.live.values().any(|(other, _)| other == rid);
        table.next += 1;
        let key = table.next;
        table.live.insert(key, (rid.to_owned(), abort));
        drop(table);
        (Live { rids: self.clone(), key }, shared)
    }

    /// Aborts every sequence whose id starts with `prefix`; returns the ids.
    fn abort(&self, prefix: &str) -> Vec<String> {
        let table = self.lock();
        let hit = table.live.values().filter(|(rid, abort)| rid.starts_with(prefix) && !abort.is_cancelled());
        hit.map(|(rid, abort)| {
            abort.cancel();
            rid.clone()
        })
        .collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A live sequence.
#[derive(Debug)]
pub(crate) struct Live {
    rids: Rids,
    key: u64,
}

impl Drop for Live {
    fn drop(&mut self) {
        self.rids.lock().live.remove(&self.key);
    }
}

/// Answers `/abort_request`: always 200 and empty, whatever was found. An id that is not there (yet) is forgotten at once.
pub(crate) fn answer(core: &Core, body: &[u8], seq: u64) -> Reply {
    let read = || -> Result<(String, bool), Failure> {
        if body.is_empty() {
            return Ok((String::new(), false));
        }
        let fields = Fields::parse(body)?;
        Ok((fields.text("rid")?.unwrap_or_default(), fields.truth("abort_all")?))
    };
    let (rid, all) = match read() {
        Ok(read) => read,
        Err(failure) => return failure.reply(Api::Chat),
    };
    let too_wide = |detail: String| {
        if core.config.strict {
            core.violate(Some(seq), ViolationKind::AbortTooWide, detail);
        }
    };
    if all {
        too_wide(format!("abort_all ended {:?}", core.rids.abort("")));
    } else if rid.is_empty() {
        // It would match everything; the tokenizer manager guards against that.
        too_wide("no rid".to_owned());
    } else {
        for hit in core.rids.abort(&rid).iter().filter(|hit| !is_own(hit, &rid)) {
            too_wide(format!("an abort of {rid} ended {hit}"));
        }
    }
    core.changed();
    Reply::Whole { status: 200, headers: Vec::new(), body: bytes::Bytes::new() }
}

/// Whether `hit` is the request `rid`, or one of its batch.
fn is_own(hit: &str, rid: &str) -> bool {
    let rest = hit.strip_prefix(rid).unwrap_or("-");
    rest.is_empty() || rest.strip_prefix('_').is_some_and(|number| number.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abort_hits_every_id_that_starts_with_it() {
        let rids = Rids::default();
        let token = CancellationToken::new;
        let tokens = [token(), token(), token()];
        let lives: Vec<_> = ["req-1", "req-10", "req-2"]
            .iter()
            .zip(&tokens)
            .map(|(rid, abort)| rids.enter(rid, abort.clone()))
            .collect();
        assert!(lives.iter().all(|(_, shared)| !shared));
        assert!(rids.enter("req-2", token()).1, "the same id twice");
        let mut hit = rids.abort("req-1");
        hit.sort();
        assert_eq!(hit, ["req-1", "req-10"]);
        assert_eq!(tokens.each_ref().map(CancellationToken::is_cancelled), [true, true, false]);
        assert!(rids.abort("req-1").is_empty(), "a second abort does nothing");
        drop(lives);
        assert!(rids.abort("").is_empty());
    }

    #[test]
    fn a_batch_belongs_to_its_id() {
        for (hit, own) in [("a", true), ("a_0", true), ("a_17", true), ("a0", false), ("a_x", false), ("ab", false)] {
            assert_eq!(is_own(hit, "a"), own, "{hit}");
        }
    }
}
