//! Runs a generation request and answers it, whole or as a stream.

use std::sync::{Arc, Mutex, PoisonError};

use http::request::Parts;

use super::call::{self, Api, Call};
use super::failure::Failure;
use super::shape::Shape;
use crate::answer::Reply;
use crate::config::{Role, StreamHead};
use crate::fault::Fault;
use crate::flow::{self, Ending, Frames};
use crate::sequence::{Broken, Emitted, Finished};
use crate::state::Core;

/// Answers a generation request.
pub(crate) async fn answer(
    core: &Arc<Core>,
    api: Api,
    head: &Parts,
    body: &[u8],
    seq: u64,
    fault: Option<&Fault>,
) -> Result<Reply, Failure> {
    let mut call = call::read(core, api, head, body, seq, fault)?;
    core.meters.count(|counts| counts.requests += 1);
    let (jobs, live) = (std::mem::take(&mut call.jobs), std::mem::take(&mut call.live));
    let shape = Shape::new(&call);
    let words = Words::new(core, &call);
    if !call.stream {
        let results = flow::whole(core, jobs, live).await.map_err(|broken| words.failure(broken))?;
        return Ok(Reply::json(200, shape.whole(&call, &results)));
    }
    let mut running = flow::start(core, jobs, live);
    if api != Api::Generate && core.config.stream_head == StreamHead::WithFirstToken {
        running.first_token().await.map_err(|broken| words.failure(broken))?;
    }
    let so_far = Mutex::new(vec![Cumulative::default(); call.prompts.len() * call.samples as usize]);
    let frames = Stream { call, shape, words, so_far };
    Ok(Reply::Stream(Box::new(move |mut outlet| {
        Box::pin(async move {
            // An injected end has sent everything there is to send.
            if running.write(&frames, &mut outlet).await.is_ok() {
                outlet.finish().await;
            }
        })
    })))
}

/// What went wrong, in SGLang's words.
struct Words {
    role: Role,
    rid: String,
    room: u64,
    bootstrap: String,
    patience: u64,
}

impl Words {
    fn new(core: &Core, call: &Call) -> Words {
        let (room, bootstrap) = call.legs.first().cloned().unwrap_or_default();
        Words {
            role: core.config.role,
            rid: call.rids.first().cloned().unwrap_or_default(),
            room,
            bootstrap,
            patience: core.config.meeting_timeout.as_secs(),
        }
    }

    fn failure(&self, broken: Broken) -> Failure {
        let Words { role, rid, room, bootstrap, patience } = self;
        let stage = match broken {
            Broken::KvLoad => "transfer",
            _ if *role == Role::Prefill => "bootstrap",
            _ => "handshake",
        };
        let why = match broken {
            Broken::EngineDead | Broken::Unheard => return Failure::internal("The engine is dead."),
            Broken::Aborted if *role == Role::Combined => {
                return Failure::internal("Abort in waiting queue");
            }
            Broken::Aborted | Broken::Unreachable => "Aborted by AbortReq.".to_owned(),
            Broken::KvLoad => format!("Lost connection with prefill instance (bootstrap_addr: {bootstrap})"),
            Broken::Alone => format!("Request {room} timed out after {patience}s in KVPoll.WaitingForInput"),
        };
        let (leg, prefix) = if *role == Role::Prefill { ("Prefill", "") } else { ("Decode", "decode_req.") };
        Failure::internal(format!(
            "{leg} {stage} failed for request rank=0 {prefix}req.rid='{rid}' {prefix}req.bootstrap_room={room} with \
             exception KVTransferError(bootstrap_room={room}): {why}"
        ))
    }
}

/// `/generate` repeats the whole output with every token.
#[derive(Clone, Debug, Default)]
struct Cumulative {
    text: String,
    ids: Vec<u32>,
}

struct Stream {
    call: Call,
    shape: Shape,
    words: Words,
    so_far: Mutex<Vec<Cumulative>>,
}

impl Frames for Stream {
    fn opening(&self, index: usize) -> Vec<String> {
        if self.call.api == Api::Chat { vec![self.shape.role(index)] } else { Vec::new() }
    }

    fn token(&self, token: &Emitted) -> Vec<String> {
        if self.call.api != Api::Generate {
            return self.shape.token(self.call.api, token);
        }
        let mut so_far = self.so_far.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(choice) = so_far.get_mut(token.index as usize) else { return Vec::new() };
        choice.text.push_str(&token.piece);
        if token.position as usize > choice.ids.len() {
            choice.ids.push(token.id);
        }
        let finish = token.finish.as_ref().map(|(finish, reason)| (*finish, reason.as_deref()));
        let index = token.index as usize;
        vec![format!("data: {}\n\n", Shape::generated(&self.call, index, &choice.text, &choice.ids, finish))]
    }

    fn closing(&self, results: &[Finished]) -> Vec<String> {
        let completion = results.iter().map(|result| result.output.ids.len()).sum();
        self.usage(completion)
    }

    fn failed(&self, broken: Broken, _opened: bool) -> Ending {
        let mut events = vec![self.words.failure(broken).event(self.call.api)];
        // The real engine counts up even a stream that failed.
        events.extend(self.usage(0));
        Ending::Events(events)
    }
}

impl Stream {
    fn usage(&self, completion: usize) -> Vec<String> {
        let asked = self.call.include_usage && self.call.api != Api::Generate;
        if asked { vec![self.shape.usage_event(&self.call, completion)] } else { Vec::new() }
    }
}
