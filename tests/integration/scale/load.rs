//! Requests at a rate that does not depend on how fast they are answered, and what became of each.

use std::fmt;
use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use crate::harness::engines::MODEL;
use crate::harness::http::Call;

/// How long one request may take: beyond it, it counts as failed.
const LONGEST: Duration = Duration::from_mins(1);

/// A request that did not end as it should have.
#[derive(Clone)]
pub struct Failed {
    /// When it was sent, from the start of the load.
    pub sent: Duration,
    /// What happened.
    pub why: String,
}

impl fmt::Debug for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sent at {:?}: {}", self.sent, self.why)
    }
}

/// What became of a load.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Requests that were sent.
    pub sent: usize,
    /// Those that failed, in the order in which they did.
    pub failed: Vec<Failed>,
    /// From the first to the last request sent.
    pub lasted: Duration,
}

/// A streamed chat of this many tokens; `number` makes the prompt unlike the others.
pub fn streamed_chat(base: &str, number: usize, tokens: usize) -> Call {
    let body = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": format!("{number} bottles on the wall")}],
        "max_tokens": tokens,
        "stream": true,
    });
    Call::post(base, "/v1/chat/completions", body.to_string())
}

/// Sends a streamed chat and reads it to its end.
pub async fn complete(call: Call) -> Result<(), String> {
    let work = async {
        let answer = call.try_send().await.map_err(|error| format!("no answer: {error}"))?;
        if answer.status != 200 {
            let status = answer.status;
            let body = answer.body().await;
            return Err(format!("{status}: {}", String::from_utf8_lossy(&body.bytes)));
        }
        let (events, whole) = answer.events().collect().await;
        match events.last() {
            Some(last) if whole && last == "[DONE]" => Ok(()),
            last => Err(format!("{} events, whole: {whole}, the last {last:?}", events.len())),
        }
    };
    tokio::time::timeout(LONGEST, work).await.unwrap_or_else(|_| Err(format!("not within {LONGEST:?}")))
}

/// Sends `per_second` streamed chats of `tokens` tokens until `enough` ends, then waits for the last of them.
pub async fn open_loop(base: &str, per_second: u32, tokens: usize, enough: impl Future<Output = ()>) -> Outcome {
    let started = Instant::now();
    let mut beat = tokio::time::interval(Duration::from_secs(1) / per_second);
    // A late sender catches up: the rate is what was promised.
    beat.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let (mut running, mut result) = (JoinSet::new(), Outcome::default());
    let mut enough = std::pin::pin!(enough);
    loop {
        tokio::select! {
            biased;
            () = enough.as_mut() => break,
            Some(ended) = running.join_next() => result.failed.extend::<Option<Failed>>(ended.expect("a request")),
            _ = beat.tick() => {
                let (call, sent) = (streamed_chat(base, result.sent, tokens), started.elapsed());
                result.sent += 1;
                running.spawn(async move { complete(call).await.err().map(|why| Failed { sent, why }) });
            }
        }
    }
    result.lasted = started.elapsed();
    while let Some(ended) = running.join_next().await {
        result.failed.extend(ended.expect("a request"));
    }
    result
}

impl Outcome {
    /// Requests per second that were really sent.
    pub fn rate(&self) -> f64 {
        self.sent as f64 / self.lasted.as_secs_f64()
    }
}
