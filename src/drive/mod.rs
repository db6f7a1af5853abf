//! The one task that runs an exchange: it feeds the machine events and carries out its effects over tokio.
//!
//! The task waits for whichever comes first: the peer (Envoy, or the HTTP front), the prefill leg, work on the
//! prompt, the end of a shutdown. A message that already waits is taken first, so nothing is lost. When the task
//! ends, for whatever reason, the prefill leg is dropped with it, and with the leg its connection.

mod abort;
mod peer;
mod trace;
mod wake;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::HeaderMap;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use peer::{Incoming, Peer};

use crate::clock::Clock;
use crate::engines::leg::{EngineClient, LegOutcome, LegRequest};
use crate::engines::lookup::{LookedUp, LookupError, Lookups};
use crate::exchange::{Adapter, DecodeJob, Decoded, Effect, Event, Exchange, PrepareJob, Prepared, RequestHead, World};
use crate::panics::{Panicked, guarded, guarded_work};
use crate::rng::Seeds;
use crate::state::limits::LimitVerdict;
use crate::state::plane::Claimed;
use crate::state::responses::Home;
use crate::telemetry::{LegSpan, PrefillLeg, Tracer, request_id};
use crate::tls::EngineTls;
use trace::Spans;
use wake::Wakes;

/// Runs exchanges.
#[derive(Debug)]
pub struct Driver {
    world: Arc<World>,
    client: EngineClient,
    lookups: Arc<Lookups>,
    clock: Clock,
    seeds: Seeds,
    tracer: Tracer,
    tasks: TaskTracker,
    stops: Stops,
    wakes: Arc<Wakes>,
}

/// What a shutdown tells exchanges, in this order.
#[derive(Clone, Debug, Default)]
pub struct Stops {
    /// No new requests: whoever has sent none yet ends now, or it would hold the replica for as long as it likes.
    pub idle: CancellationToken,
    /// The drain timeout has passed: everybody ends now.
    pub cut: CancellationToken,
}

/// A prefill leg whose client leaves is cancelled after this long, unless its answer was on its way: that answer stands
/// for KV blocks which the prefill pod would hold until their lease ends.
const LAST_MOMENT: Duration = Duration::from_millis(50);

type Pending<T> = Option<Pin<Box<dyn Future<Output = T> + Send>>>;

/// Waits for a future that may not be there.
async fn arrived<T>(pending: &mut Pending<T>) -> T {
    match pending {
        Some(future) => {
            let value = future.as_mut().await;
            *pending = None;
            value
        }
        None => std::future::pending().await,
    }
}

/// Waits until then; for ever without a time.
async fn until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

impl Driver {
    /// A driver whose tasks run in `tasks` and end by `stops`.
    pub fn new(
        world: Arc<World>,
        clock: Clock,
        seeds: Seeds,
        tracer: Tracer,
        tasks: TaskTracker,
        stops: Stops,
    ) -> Driver {
        let client = EngineClient::new();
        let lookups = lookups(&client, &world, &tasks);
        Driver { world, client, lookups, clock, seeds, tracer, tasks, stops, wakes: Arc::default() }
    }

    /// The same, for engines over TLS too.
    #[must_use]
    pub fn with_engine_tls(mut self, tls: Option<EngineTls>) -> Driver {
        self.client = EngineClient::with_tls(tls);
        self.lookups = lookups(&self.client, &self.world, &self.tasks);
        self
    }

    /// What exchanges share.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// The client for engines.
    pub fn client(&self) -> &EngineClient {
        &self.client
    }

    /// Runs one exchange in a task of its own. `metadata` are the headers of the call that carries it (gRPC
    /// metadata), where Envoy puts its trace context. A panic ends this exchange alone: the client gets a 500.
    pub fn spawn<P: Peer>(self: &Arc<Self>, mut peer: P, metadata: HeaderMap) {
        let driver = Arc::clone(self);
        self.tasks.spawn(async move {
            if guarded(driver.run(&mut peer, &metadata)).await.is_err() {
                tracing::error!("an exchange panicked; its client gets a 500");
                peer.crashed().await;
            }
        });
    }

    async fn run<P: Peer>(&self, peer: &mut P, metadata: &HeaderMap) {
        let mut exchange = Exchange::new(Arc::clone(&self.world), P::ADAPTER, self.seeds.next(), self.clock.now());
        let mut spans = Spans::default();
        let mut prefill: Pending<LegOutcome> = None;
        let mut decode: Pending<Decoded> = None;
        let mut prepare: Pending<Prepared> = None;
        let mut charge: Pending<LimitVerdict> = None;
        let mut find: Pending<Option<Home>> = None;
        let mut lookup: Pending<Result<Arc<LookedUp>, LookupError>> = None;
        let mut claim: Pending<Claimed> = None;
        let mut delivery: Option<BoxFuture<'static, ()>> = None;
        let mut effects = Vec::with_capacity(4);
        // A token of its own: thousands of tasks that look at one would share its lock.
        let cut = self.stops.cut.child_token();
        while !exchange.ended() {
            let deadline = exchange.deadline().map(|at| self.clock.instant_at(at));
            let incoming = tokio::select! {
                biased;
                // First, so that a peer that always has something to say cannot put it off.
                () = cut.cancelled() => Incoming::Event(Event::Shutdown),
                incoming = peer.next() => incoming,
                outcome = arrived(&mut prefill) => Incoming::Event(Event::Prefill(outcome)),
                decoded = arrived(&mut decode) => Incoming::Event(Event::Decoded(decoded)),
                prepared = arrived(&mut prepare) => Incoming::Event(Event::Prepared(prepared)),
                verdict = arrived(&mut charge) => Incoming::Event(Event::LimitsCharged(verdict)),
                home = arrived(&mut find) => Incoming::Event(Event::ResponseFound(home)),
                claimed = arrived(&mut claim) => Incoming::Event(Event::Claimed(claimed)),
                found = arrived(&mut lookup) => Incoming::Event(Event::LookedUp(found)),
                () = until(deadline) => Incoming::Event(Event::Timer),
                () = self.stops.idle.cancelled(), if !exchange.begun() => Incoming::Event(Event::Shutdown),
            };
            let event = match incoming {
                Incoming::Event(event) => event,
                Incoming::Head { method, path, headers, end } => {
                    spans.begin(&self.tracer, &headers, metadata, &method, P::ADAPTER == Adapter::Envoy);
                    let random = uuid::Uuid::new_v4();
                    let request_id = request_id(spans.trace_id(), headers.get("traceparent"), random);
                    let id_is_unique = request_id == random.to_string();
                    spans.set_request_id(&request_id);
                    exchange.set_traced(spans.records());
                    Event::Head(RequestHead { request_id, id_is_unique, method, path, headers, end })
                }
            };
            // The leg may be ending in this very moment, and then the decode pod has to hear of it.
            let event = match (event, prefill.as_mut()) {
                (Event::Gone, Some(leg)) if exchange.waits_for_prefill() => {
                    match tokio::time::timeout(LAST_MOMENT, leg).await {
                        Ok(outcome) => Event::GoneAfterPrefill(outcome),
                        Err(_) => Event::Gone,
                    }
                }
                (event, _) => event,
            };
            spans.before(&event, exchange.record());
            // What the machine logs carries the request's id and joins its trace.
            spans.in_scope(|| exchange.on(self.clock.now(), event, &mut effects));
            if let Some(routing) = exchange.take_prefix_routing() {
                self.world.metrics.prefix_routed(&routing, self.clock.now());
            }
            if let (Some(carried), Some(model)) = (spans.after(&exchange), &exchange.record().model) {
                self.world.plane.carries(model, carried);
            }
            for effect in effects.drain(..) {
                match effect {
                    Effect::Decode(job) => decode = Some(Box::pin(decoded(*job, Arc::clone(&self.world)))),
                    Effect::Prepare(job) => prepare = Some(Box::pin(off_the_loop(*job))),
                    Effect::StartPrefill(mut call) => {
                        let add = spans.prefill(exchange.record(), &call.address);
                        replace_trace_headers(&mut call.headers, &add);
                        let client = self.client.clone();
                        prefill = Some(Box::pin(async move { client.prefill(*call).await }));
                    }
                    Effect::ChargeLimits(call) => {
                        spans.charge_limits();
                        let limits = self.world.limits.clone();
                        charge = limits.map(|limits| Box::pin(async move { limits.charge(*call).await }) as _);
                    }
                    Effect::FindResponse(id) => find = Some(self.world.responses.find(id)),
                    Effect::Claim(order) => {
                        spans.claim(exchange.record());
                        claim = Some(self.world.plane.claim(*order));
                    }
                    Effect::LookUp(call) => {
                        let (lookups, clock) = (Arc::clone(&self.lookups), self.clock);
                        if spans.records() {
                            let known = lookups.knows(&call.key, call.kind, clock.now());
                            spans.look_up(exchange.record(), &call, known);
                        }
                        lookup = Some(Box::pin(async move { lookups.get(call.key, call.kind, clock.now()).await }));
                    }
                    Effect::CancelPrefill => {
                        spans.cancel_prefill();
                        prefill = None;
                    }
                    Effect::ForgetConnections => self.client.forget_connections(),
                    Effect::DetachPrefill(leg) => self.detach(prefill.take(), *leg, spans.detach_prefill()),
                    Effect::Abort(plan) => {
                        let (branch, legs) = spans.aborts(&plan);
                        self.abort(*plan, &branch, &legs);
                    }
                    Effect::Wake(call) => self.wake(*call),
                    Effect::Deliver(mut call) => {
                        let span = spans.deliver(exchange.record(), &call.address);
                        if let Some(span) = &span {
                            replace_trace_headers(&mut call.headers, span.headers());
                        }
                        delivery = Some(self.deliver(*call, span).boxed());
                    }
                    Effect::Route(mut plan) => {
                        let add = spans.hand_over(exchange.record(), plan.address.as_deref());
                        replace_trace_headers(&mut plan.headers, &add);
                        unless_cut(&cut, peer.route(*plan, add)).await;
                    }
                    Effect::End(record) => {
                        let sampled = spans.sampled(self.clock);
                        spans.finish(&record);
                        self.world.metrics.finish(&record, sampled);
                    }
                    effect => unless_cut(&cut, peer.apply(effect)).await,
                }
            }
            spans.handled();
        }
        // Nobody waits any more, and everything is released; only the engines have to hear of it.
        drop(prefill);
        if let Some(delivery) = delivery.or_else(|| peer.undelivered()) {
            unless_cut(&cut, delivery).await;
        }
    }

    /// Lets a prefill leg that nobody waits for go on to its end, which the call bounds; its outcome only counts.
    fn detach(&self, leg: Pending<LegOutcome>, counted: PrefillLeg, span: Option<LegSpan>) {
        let (Some(leg), cut) = (leg, self.stops.cut.child_token()) else { return };
        self.tasks.spawn(async move {
            tokio::select! {
                outcome = leg => {
                    if let Some(span) = span {
                        trace::end_prefill(span, &outcome);
                    }
                    counted.finish(outcome.metric_outcome());
                }
                () = cut.cancelled() => {}
            }
        });
    }

    /// Sends a request that nobody waits for and hangs up as soon as the pod answers, or after the call's time.
    fn deliver(&self, call: LegRequest, span: Option<LegSpan>) -> impl Future<Output = ()> + Send + 'static {
        let client = self.client.clone();
        async move {
            let sent = client.post(&call.address, &call.path, call.headers, call.body);
            let answer = tokio::time::timeout(call.timeout, sent).await;
            let Some(mut span) = span else { return };
            match answer {
                Ok(Ok(answer)) => {
                    span.answered(answer.status().as_u16());
                    span.succeed();
                }
                Ok(Err(_)) => span.fail("transport"),
                Err(_) => span.fail("timeout"),
            }
        }
    }
}

fn lookups(client: &EngineClient, world: &World, tasks: &TaskTracker) -> Arc<Lookups> {
    let authorization = world.knobs.engine_auth.authorization.clone();
    Arc::new(Lookups::new(client.clone(), authorization, tasks.clone()))
}

/// The legs carry this trace's context instead of the client's.
fn replace_trace_headers(headers: &mut HeaderMap, trace: &HeaderMap) {
    for (name, value) in trace {
        headers.insert(name.clone(), value.clone());
    }
}

/// Waits for the peer, which may take as long as it likes to take something in, but not beyond the end of a shutdown.
/// A peer that is late even then gets what it can take at once, so that it learns of the cut.
async fn unless_cut(cut: &CancellationToken, taken: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        () = taken => {}
        () = cut.cancelled() => {}
    }
}

/// Runs a job on a blocking thread. Should it panic, the request is routed without what it would have found out.
async fn off_the_loop(job: PrepareJob) -> Prepared {
    let done = tokio::task::spawn_blocking(move || guarded_work(|| job.run())).await;
    done.unwrap_or(Err(Panicked)).unwrap_or_else(|error| {
        tracing::error!(%error, "the prompt could not be prepared");
        Prepared::unknown()
    })
}

/// Decodes a body on a blocking thread. Should that panic, the body cannot be read.
async fn decoded(job: DecodeJob, world: Arc<World>) -> Decoded {
    tokio::task::spawn_blocking(move || job.run()).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a body could not be decoded");
        Decoded::lost(&world.buffered)
    })
}

#[cfg(test)]
mod tests;
