//! The virtual world: gateways and engines on one time line of events.
//!
//! One request goes the way that `exchange::machine` takes it: select and charge, offer the prefix, prefill leg; at its
//! end the prefill charges are dropped and the decode charge handed over; KV transfer and tokens; `complete`. A prefill
//! leg that takes longer than the knob allows fails, and everything it held is dropped.

mod sharing;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use super::ReplayError;
use super::decode::{DecodeEngine, Sequence};
use super::gateway::{EngineId, Gateway};
use super::options::{Policies, ReplayOptions};
use super::prefill::{PrefillEngine, Prompt};
use super::trace::{Request, Trace};
use crate::clock::Tick;
use crate::knobs::PdKnobs;
use crate::routing::{Charges, PromptLength, RequestFacts, Target};

/// The first arrival. Not zero, so that "a while ago" exists.
const START: Tick = Tick::from_millis(1_000);
/// Loads of the engines are compared this often, or more rarely when the trace is long.
const SAMPLE: Duration = Duration::from_millis(250);
/// At most about so many times.
const SAMPLES: u32 = 20_000;
/// Progress is told after so many requests.
pub(super) const PROGRESS_STEP: usize = 64;

/// Events; those of one moment happen in the order in which they were scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive(usize),
    PrefillEnds {
        pod: usize,
        version: u64,
    },
    PrefillTimesOut(usize),
    Transferred {
        pod: usize,
        request: usize,
    },
    BatchChanges {
        pod: usize,
        version: u64,
    },
    Sample,
    /// A gateway's turn to publish.
    Publish(usize),
    /// A message reaches the plane.
    AtPlane(usize),
    /// The others hear what changed.
    Announced(usize),
    /// Its answer reaches the gateway.
    Answered(usize),
    /// Other gateways read that a prefill pod gets a request's prefix.
    PrefixSpreads {
        gateway: usize,
        request: usize,
        prefill: usize,
    },
}

/// Why a request was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Routing found no target.
    NotRouted,
    /// The prefill leg took too long.
    PrefillTimeout,
    /// No decode pod can hold it.
    TooLong,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Course {
    /// Arrival.
    pub arrived: Tick,
    /// The prefill engine began with it.
    pub prefill_started: Option<Tick>,
    /// The prompt was computed.
    pub prefill_ended: Option<Tick>,
    /// Prompt tokens found in the prefill engine's cache.
    pub cached: u64,
    /// The first token left the decode engine.
    pub first_token: Option<Tick>,
    /// It has its whole answer, or failed.
    pub ended: Option<Tick>,
    /// Why it failed.
    pub failure: Option<Failure>,
}

/// Sums over the samples of loads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Imbalance {
    /// Of the largest load of a pod.
    pub max: f64,
    /// Of the mean load.
    pub mean: f64,
}

impl Imbalance {
    fn add(&mut self, loads: impl Iterator<Item = u64> + Clone) {
        let pods = loads.clone().count().max(1) as f64;
        self.max += loads.clone().max().unwrap_or(0) as f64;
        self.mean += loads.sum::<u64>() as f64 / pods;
    }

    /// The time average of the largest load over the time average of the mean load; 1 when there was none.
    pub fn ratio(self) -> f64 {
        if self.mean > 0.0 { self.max / self.mean } else { 1.0 }
    }
}

/// What a run leaves behind.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// By request, in the order of the trace.
    pub courses: Vec<Course>,
    /// Gaps between two tokens of an answer: nanoseconds, and how many.
    pub gaps: Vec<(f64, u64)>,
    /// Of KV tokens on the decode pods.
    pub kv: Imbalance,
    /// Of prompt tokens queued and being computed on the prefill pods.
    pub prefill: Imbalance,
    /// When the last request ended.
    pub ended: Tick,
}

#[derive(Debug)]
struct Open {
    gateway: usize,
    charges: Charges,
    prefill: usize,
    decode: usize,
}

/// See the module.
pub(super) struct World<'a> {
    trace: &'a Trace,
    gateways: Vec<Gateway>,
    sharing: sharing::Fleet,
    prefills: Vec<(PrefillEngine, u64)>,
    decodes: Vec<(DecodeEngine, u64)>,
    open: Vec<Option<Open>>,
    outcome: Outcome,
    events: BinaryHeap<Reverse<(Tick, u64, Event)>>,
    scheduled: u64,
    sample: Duration,
    ended: usize,
    now: Tick,
}

impl<'a> World<'a> {
    pub(super) fn new(
        trace: &'a Trace,
        options: &ReplayOptions,
        (prefill, decode): Policies,
    ) -> Result<World<'a>, ReplayError> {
        let knobs = PdKnobs { prefill_policy: prefill, decode_policy: decode, ..PdKnobs::clone(&options.knobs.pd) };
        let gateway = |index: u64| {
            let seed = options.seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            Gateway::new(options.shape, &options.knobs, knobs.clone(), seed)
        };
        let gateways = (0..options.gateways.max(1) as u64).map(gateway).collect::<Result<Vec<_>, _>>()?;
        let pods = gateways.first().map_or(0, Gateway::slots);
        let prefill = || (PrefillEngine::new(Arc::clone(&options.engine), trace.block_tokens), 0);
        let decode = || (DecodeEngine::new(Arc::clone(&options.engine)), 0);
        let mut world = World {
            trace,
            sharing: sharing::Fleet::new(options, pods),
            gateways,
            prefills: std::iter::repeat_with(prefill).take(options.shape.prefill).collect(),
            decodes: std::iter::repeat_with(decode).take(options.shape.decode).collect(),
            open: trace.requests.iter().map(|_| None).collect(),
            outcome: Outcome { courses: vec![Course::default(); trace.requests.len()], ..Outcome::default() },
            events: BinaryHeap::new(),
            scheduled: 0,
            sample: SAMPLE.max(trace.span() / SAMPLES),
            ended: 0,
            now: START,
        };
        let first = trace.requests.first().map_or(Duration::ZERO, |request| request.at);
        world.schedule(START.plus(first), Event::Arrive(0));
        world.schedule(START.plus(world.sample / 2), Event::Sample);
        world.meet();
        Ok(world)
    }

    /// Runs to the end; `progress` is told of requests as they end.
    pub(super) fn run(mut self, progress: &(dyn Fn(usize) + Sync)) -> Result<Outcome, ReplayError> {
        let mut told = 0;
        while let Some(Reverse((now, _, event))) = self.events.pop() {
            self.now = now;
            self.happen(event);
            if self.ended - told >= PROGRESS_STEP {
                progress(self.ended - told);
                told = self.ended;
            }
        }
        progress(self.ended - told);
        let lost = self.trace.requests.len() - self.ended;
        let charged: u64 = self.gateways.iter().map(Gateway::open).sum::<u64>() + self.sharing.charged();
        if lost > 0 || charged > 0 {
            return Err(ReplayError::Lost { requests: lost, charges: charged });
        }
        let gaps = self.decodes.iter().flat_map(|(engine, _)| engine.gaps());
        self.outcome.gaps = gaps.map(|gaps| (gaps.nanos, gaps.count)).collect();
        Ok(self.outcome)
    }

    fn schedule(&mut self, at: Tick, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((at, self.scheduled, event)));
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrive(request) => self.arrive(request),
            Event::PrefillEnds { pod, version } => self.prefill_ends(pod, version),
            Event::PrefillTimesOut(request) => self.prefill_times_out(request),
            Event::Transferred { pod, request } => {
                self.look_at(EngineId::Decode(pod));
                if let Some((engine, _)) = self.decodes.get_mut(pod) {
                    engine.transferred(request);
                }
                self.plan_decode(pod);
            }
            Event::BatchChanges { pod, version } => self.batch_changes(pod, version),
            Event::Sample => self.take_sample(),
            Event::Publish(gateway) => self.publish(gateway),
            Event::AtPlane(message) => self.at_plane(message),
            Event::Announced(message) => self.announced(message),
            Event::Answered(message) => self.answered(message),
            Event::PrefixSpreads { gateway, request, prefill } => self.prefix_spreads(gateway, request, prefill),
        }
    }

    fn arrive(&mut self, request: usize) {
        let trace = self.trace;
        let Some(Request { at, .. }) = trace.requests.get(request) else { return };
        if let Some(next) = trace.requests.get(request + 1) {
            self.schedule(START.plus(next.at), Event::Arrive(request + 1));
        }
        debug_assert_eq!(self.now, START.plus(*at));
        self.course(request, |course, now| course.arrived = now);
        let turn = request % self.gateways.len().max(1);
        match self.select(turn, request) {
            Some(open) if self.sharing.claims() => self.claim(request, open, 0),
            Some(open) => self.begin(request, open),
            None => self.end(request, Some(Failure::NotRouted)),
        }
    }

    /// Selects and charges; `None` = there is no target.
    fn select(&mut self, turn: usize, request: usize) -> Option<Open> {
        let Request { prompt, hashes: prefix, .. } = self.trace.requests.get(request)?;
        self.confirm(turn);
        self.look_at_all(turn);
        let gateway = self.gateways.get_mut(turn)?;
        let peers = self.sharing.peers(gateway.peers());
        let looks = gateway.knobs().prefill_policy.looks_prefixes_up();
        let hashes = if looks { Arc::clone(prefix) } else { Arc::default() };
        let facts = RequestFacts {
            length: PromptLength::Exactly(*prompt),
            hashes: &hashes,
            prompt_tokens: *prompt,
            prefix_tokens: if looks { *prompt } else { 0 },
            ..RequestFacts::default()
        };
        let (decision, charges) = gateway.route(self.now, &facts, peers).ok()?;
        // There are no combined pods, and every request can be split: a single target does not exist here.
        let Target::Pair { prefill, decode } = decision.target else { return None };
        let engines = (gateway.engine_of(&prefill), gateway.engine_of(&decode));
        let (Some(EngineId::Prefill(prefill)), Some(EngineId::Decode(decode))) = engines else { return None };
        Some(Open { gateway: turn, charges, prefill, decode })
    }

    /// The selection is settled: the request goes to its prefill pod.
    fn begin(&mut self, request: usize, open: Open) {
        let trace = self.trace;
        let Some(Request { prompt, hashes: prefix, .. }) = trace.requests.get(request) else { return };
        let (turn, prefill) = (open.gateway, open.prefill);
        if let Some(slot) = self.open.get_mut(request) {
            *slot = Some(open);
        }
        let Some(gateway) = self.gateways.get_mut(turn) else { return };
        let timeout = gateway.knobs().prefill_request_timeout;
        if gateway.knobs().prefill_policy.looks_prefixes_up() {
            gateway.note(prefill, *prompt, prefix);
            self.spread(turn, request, prefill);
        } else {
            gateway.note(prefill, *prompt, &Arc::default());
        }
        self.changed(turn);
        self.look_at(EngineId::Prefill(prefill));
        if let Some((engine, _)) = self.prefills.get_mut(prefill) {
            let (hashes, block_tokens) = (Arc::clone(prefix), trace.block_tokens);
            engine.offer(Prompt { request, tokens: *prompt, hashes, block_tokens });
        }
        self.start_prefill(prefill);
        self.schedule(self.now.plus(timeout), Event::PrefillTimesOut(request));
    }

    fn start_prefill(&mut self, pod: usize) {
        let now = self.now;
        let Some((engine, version)) = self.prefills.get_mut(pod) else { return };
        if let Some(ends) = engine.start(now) {
            *version += 1;
            let version = *version;
            self.schedule(ends, Event::PrefillEnds { pod, version });
        }
    }

    fn prefill_ends(&mut self, pod: usize, version: u64) {
        if self.prefills.get(pod).is_none_or(|(_, current)| *current != version) {
            return;
        }
        self.look_at(EngineId::Prefill(pod));
        let done = self.prefills.get_mut(pod).and_then(|(engine, _)| engine.finish());
        if let Some(done) = done {
            let request = done.prompt.request;
            self.course(request, |course, now| {
                course.prefill_started = Some(done.started);
                course.prefill_ended = Some(now);
                course.cached = done.cached;
            });
            self.hand_over(request);
        }
        self.start_prefill(pod);
    }

    fn hand_over(&mut self, request: usize) {
        let Some(decode) = self.open.get(request).and_then(|open| open.as_ref()).map(|open| open.decode) else {
            return;
        };
        self.look_at(EngineId::Decode(decode));
        let now = self.now;
        if let Some(Some(open)) = self.open.get_mut(request) {
            open.charges.prefill = None;
            open.charges.tokens.prefill_done(now);
            open.charges.decode.hand_over();
            let gateway = open.gateway;
            self.changed(gateway);
        }
        let Some(facts) = self.trace.requests.get(request) else { return };
        let sequence = Sequence { request, prompt: facts.prompt, output: facts.output };
        let Some((engine, _)) = self.decodes.get_mut(decode) else { return };
        if !engine.offer(sequence) {
            return self.end(request, Some(Failure::TooLong));
        }
        self.admit(decode);
    }

    fn prefill_times_out(&mut self, request: usize) {
        let Some(Some(Open { charges, prefill: pod, .. })) = self.open.get(request) else { return };
        if charges.prefill.is_none() {
            return;
        }
        let pod = *pod;
        self.look_at(EngineId::Prefill(pod));
        if let Some((engine, version)) = self.prefills.get_mut(pod)
            && engine.cancel(request)
        {
            // The end that was scheduled is another one's now.
            *version += 1;
            self.start_prefill(pod);
        }
        self.end(request, Some(Failure::PrefillTimeout));
    }

    fn admit(&mut self, pod: usize) {
        loop {
            let admitted = self.decodes.get_mut(pod).and_then(|(engine, _)| engine.admit());
            let Some((sequence, takes)) = admitted else { break };
            self.schedule(self.now.plus(takes), Event::Transferred { pod, request: sequence.request });
        }
    }

    /// Schedules the next change of the batch instead of the one that was scheduled.
    fn plan_decode(&mut self, pod: usize) {
        let now = self.now;
        let Some((engine, version)) = self.decodes.get_mut(pod) else { return };
        *version += 1;
        let version = *version;
        if let Some(at) = engine.next_change(now) {
            self.schedule(at, Event::BatchChanges { pod, version });
        }
    }

    fn batch_changes(&mut self, pod: usize, version: u64) {
        if self.decodes.get(pod).is_none_or(|(_, current)| *current != version) {
            return;
        }
        self.look_at(EngineId::Decode(pod));
        let now = self.now;
        let ended = self.decodes.get_mut(pod).map(|(engine, _)| engine.change(now)).unwrap_or_default();
        for one in ended {
            let request = one.sequence.request;
            self.course(request, |course, _| course.first_token = Some(one.first_token));
            self.end(request, None);
        }
        self.admit(pod);
        self.plan_decode(pod);
    }

    fn end(&mut self, request: usize, failure: Option<Failure>) {
        let open = self.open.get_mut(request).and_then(Option::take);
        if let Some(open) = open {
            let gateway = open.gateway;
            if failure.is_none() {
                open.charges.decode.complete();
            } else {
                drop(open);
            }
            self.changed(gateway);
        }
        self.ended += 1;
        self.outcome.ended = self.now;
        self.course(request, |course, now| {
            course.ended = Some(now);
            course.failure = failure;
        });
    }

    fn course(&mut self, request: usize, note: impl FnOnce(&mut Course, Tick)) {
        if let Some(course) = self.outcome.courses.get_mut(request) {
            note(course, self.now);
        }
    }

    fn take_sample(&mut self) {
        let now = self.now;
        self.outcome.kv.add(self.decodes.iter().map(|(engine, _)| engine.kv_tokens(now)));
        self.outcome.prefill.add(self.prefills.iter().map(|(engine, _)| engine.outstanding()));
        let next = now.plus(self.sample);
        // What is left behind the last arrival drains, evenly or not.
        if next <= START.plus(self.trace.span()) {
            self.schedule(next, Event::Sample);
        }
    }

    /// Every gateway scrapes the pod as often as it was due, before it changes.
    fn look_at(&mut self, engine: EngineId) {
        for gateway in 0..self.gateways.len() {
            self.scrape(gateway, engine);
        }
    }

    /// The gateway scrapes every pod as often as it was due, before it selects.
    fn look_at_all(&mut self, gateway: usize) {
        for pod in 0..self.prefills.len() {
            self.scrape(gateway, EngineId::Prefill(pod));
        }
        for pod in 0..self.decodes.len() {
            self.scrape(gateway, EngineId::Decode(pod));
        }
    }

    fn scrape(&mut self, gateway: usize, engine: EngineId) {
        let Some(gateway) = self.gateways.get_mut(gateway) else { return };
        match engine {
            EngineId::Prefill(pod) => {
                if let Some((prefill, _)) = self.prefills.get(pod) {
                    gateway.scrape(engine, self.now, |_| prefill.page());
                }
            }
            EngineId::Decode(pod) => {
                if let Some((decode, _)) = self.decodes.get(pod) {
                    gateway.scrape(engine, self.now, |at| decode.page(at));
                }
            }
        }
    }
}
