//! The scraping tasks: one for each pod incarnation, so that a pod which does not answer delays nobody else.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::http::{FetchError, PageSource};
use super::parse::{Page, parse_page};
use super::rates::{DrainRate, Throughput};
use crate::clock::{Clock, Tick};
use crate::fleet::{Engine, Fleet, Pod, PodState, Role, Signals, Snapshot};
use crate::knobs::ScrapeKnobs;
use crate::load::LoadView;
use crate::panics::guarded;
use crate::rng::Rng;
use crate::telemetry::PodLabels;

/// The pause between scrapes of a failing pod grows up to this.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// A page that is passed on is kept no more often than this: copying it costs more than reading it.
const KEEP_EVERY: Duration = Duration::from_secs(1);
/// A longer page is not passed on. (Those of vLLM and SGLang have 30 to 100 kB.)
const MAX_KEPT: usize = 1 << 20;

/// Told what goes wrong; counts it.
pub trait ScrapeObserver: Send + Sync + 'static {
    /// A scrape of this pod failed.
    fn fail(&self, pod: &PodLabels);
    /// A page lacked a metric which this engine always had. Told once for each page, under the name of the
    /// reference's section 6.2, so that a counter keeps rising for as long as routing is blind.
    fn missing(&self, engine: Engine, metric: &'static str);
    /// A page was too long to be passed on.
    fn not_kept(&self);
}

/// What the scraping tasks share.
#[derive(Debug)]
pub struct Scraper<S, O> {
    /// Interval, timeout.
    pub knobs: ScrapeKnobs,
    /// Where pages come from.
    pub pages: S,
    /// Who hears of failures.
    pub observer: O,
    /// Time.
    pub clock: Clock,
    /// Start of the jitter's random numbers.
    pub seed: u64,
}

/// Everything about a pod that a scraping task has taken in. A change of it restarts the task.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    address: String,
    engine: Engine,
    role: Role,
    model: Arc<str>,
}

impl Target {
    /// `None` for pods that have no page to offer.
    fn of(pod: &Pod) -> Option<Target> {
        let spec = &pod.spec;
        spec.scraped().then(|| Target {
            address: spec.metric_address(),
            engine: spec.engine,
            role: spec.role,
            model: Arc::clone(&spec.model),
        })
    }

    fn path(&self) -> &'static str {
        match self.engine {
            // Its `/metrics` is a JSON queue that each reader empties.
            Engine::Trtllm => "/prometheus/metrics",
            _ => "/metrics",
        }
    }
}

/// Follows the fleet's snapshots until `cancel`: starts a scraping task for each new incarnation, stops those of the
/// departed. `changes` announces snapshots ([`crate::discovery::FleetBuilder::subscribe`]). All tasks run in
/// `tracker`.
pub fn start<S: PageSource, O: ScrapeObserver>(
    scraper: Arc<Scraper<S, O>>,
    fleet: Arc<Fleet>,
    mut changes: watch::Receiver<u64>,
    tracker: &TaskTracker,
    cancel: CancellationToken,
) {
    let tasks = tracker.clone();
    tracker.spawn(async move {
        let mut running: HashMap<u32, (Target, CancellationToken)> = HashMap::new();
        loop {
            changes.borrow_and_update();
            reconcile(&scraper, &fleet.load(), &mut running, &tasks, &cancel);
            tokio::select! {
                () = cancel.cancelled() => return,
                changed = changes.changed() => if changed.is_err() {
                    // No more snapshots will come; the tasks go on with the last one.
                    return cancel.cancelled().await;
                }
            }
        }
    });
}

fn reconcile<S: PageSource, O: ScrapeObserver>(
    scraper: &Arc<Scraper<S, O>>,
    snapshot: &Snapshot,
    running: &mut HashMap<u32, (Target, CancellationToken)>,
    tasks: &TaskTracker,
    cancel: &CancellationToken,
) {
    let mut wanted: HashMap<u32, (Target, Arc<PodState>)> =
        snapshot.pods().filter_map(|pod| Some((pod.state.slot, (Target::of(pod)?, Arc::clone(&pod.state))))).collect();
    running.retain(|slot, (target, stop)| {
        let unchanged = wanted.get(slot).is_some_and(|(now, _)| now == target);
        if unchanged {
            wanted.remove(slot);
        } else {
            stop.cancel();
        }
        unchanged
    });
    for (slot, (target, state)) in wanted {
        let stop = cancel.child_token();
        running.insert(slot, (target.clone(), stop.clone()));
        let scraper = Arc::clone(scraper);
        tasks.spawn(async move {
            let task = PodTask::new(&scraper, target, state);
            tokio::select! {
                () = stop.cancelled() => {}
                () = task.run() => {}
            }
        });
    }
}

/// The scraping of one incarnation.
struct PodTask<'a, S, O> {
    scraper: &'a Scraper<S, O>,
    target: Target,
    state: Arc<PodState>,
    rng: Rng,
    derived: Derived,
    failures: u32,
    kept: Option<Tick>,
}

impl<'a, S: PageSource, O: ScrapeObserver> PodTask<'a, S, O> {
    fn new(scraper: &'a Scraper<S, O>, target: Target, state: Arc<PodState>) -> Self {
        let rng = Rng::new(scraper.seed ^ u64::from(state.slot).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        PodTask { scraper, target, state, rng, derived: Derived::default(), failures: 0, kept: None }
    }

    /// Scrapes for ever; one at a time, so that a slow answer skips turns instead of queueing them.
    async fn run(mut self) {
        // Pods that appear together are not scraped in step.
        tokio::time::sleep(self.scraper.knobs.interval.mul_f64(self.rng.unit())).await;
        loop {
            let started = self.scraper.clock.now();
            if guarded(self.scrape()).await.is_err() {
                // The page will make it panic again; its pod is one that cannot be scraped.
                self.failures = self.failures.saturating_add(1);
                self.scraper.observer.fail(&self.state.labels);
            }
            let next = started.plus(self.pause());
            tokio::time::sleep(next.since(self.scraper.clock.now())).await;
        }
    }

    /// From one scrape's start to the next one's: the interval ±10 %, doubled for each failure in a row up to 5 s.
    fn pause(&mut self) -> Duration {
        let interval = self.scraper.knobs.interval;
        let grown = interval.saturating_mul(1 << self.failures.min(16)).min(MAX_BACKOFF.max(interval));
        grown.mul_f64(0.9 + 0.2 * self.rng.unit())
    }

    async fn scrape(&mut self) {
        let own_before = in_flight(self.state.load.total(self.scraper.clock.now()));
        let fetch = self.scraper.pages.fetch(&self.target.address, self.target.path());
        let page = match tokio::time::timeout(self.scraper.knobs.timeout, fetch).await {
            Ok(page) => page,
            Err(_) => Err(FetchError::Timeout),
        };
        let load = self.state.load.total(self.scraper.clock.now());
        match page {
            Ok(bytes) => {
                let page = parse_page(&bytes, self.target.engine, &self.target.model);
                for metric in &page.missing {
                    self.scraper.observer.missing(self.target.engine, metric);
                }
                let own = own_before.max(in_flight(load));
                let now = self.scraper.clock.now();
                let signals = self.derived.signals(&page, now, self.target.role, own, load.completed);
                self.state.signals.store(Arc::new(signals));
                self.keep(&bytes, now);
                if self.failures > 0 {
                    tracing::info!(pod = %self.state.labels.pod, "metrics are back");
                }
                self.failures = 0;
            }
            Err(error) => {
                self.scraper.observer.fail(&self.state.labels);
                if self.failures == 0 {
                    let address = &self.target.address;
                    tracing::warn!(pod = %self.state.labels.pod, %address, %error, "cannot scrape metrics");
                }
                self.failures = self.failures.saturating_add(1);
            }
        }
    }
}

impl<S, O: ScrapeObserver> PodTask<'_, S, O> {
    /// Keeps the page where it is passed on. It is copied, for what the client hands out may hold a larger buffer.
    fn keep(&mut self, page: &Bytes, now: Tick) {
        let wanted = self.scraper.knobs.labels.per_pod();
        if !wanted || self.kept.is_some_and(|at| now.since(at) < KEEP_EVERY) {
            return;
        }
        self.kept = Some(now);
        if page.len() <= MAX_KEPT {
            self.state.page.store(Some(Arc::new(Bytes::copy_from_slice(page))));
        } else {
            self.scraper.observer.not_kept();
            self.state.page.store(None);
        }
    }
}

/// The work of this replica, and of those that publish theirs, that the engine counts as running: decode requests handed
/// over, and on a prefill pod the prefill legs. Of what a fading share no longer accounts for, the engine's own count tells.
pub fn in_flight(load: LoadView) -> u64 {
    load.running + load.prefills
}

/// What takes more than one page to know of a pod. Pure, so that simulated engines can be read like real ones.
#[derive(Debug, Default)]
pub struct Derived {
    generation: Throughput,
    prompt: Throughput,
    drain: DrainRate,
}

impl Derived {
    /// The signals of one page. `own` is the larger of the known work in flight before and after the scrape: a request
    /// that came or went in between is not taken for somebody else's.
    pub fn signals(&mut self, page: &Page, now: Tick, role: Role, own: u64, completed: u64) -> Signals {
        let generation = page.generation_tokens.and_then(|tokens| self.generation.push(now, tokens));
        let prompt = page.prompt_tokens.and_then(|tokens| self.prompt.push(now, tokens));
        let drain = (role != Role::Prefill).then(|| self.drain.push(now, completed)).flatten();
        Signals {
            at: Some(now),
            running: page.running,
            waiting: page.waiting,
            prefill_prealloc_queue: page.prefill_prealloc_queue,
            decode_prealloc_queue: page.decode_prealloc_queue,
            kv_usage: page.kv_usage,
            generation_tps: page.generation_tps.or(generation),
            prompt_tps: page.prompt_tps.or(prompt),
            prefill_seconds_mean: page.prefill_seconds_mean,
            foreign_running: (page.running.unwrap_or(0.0) - own as f64).max(0.0),
            drain_rate: drain,
            adapters: page.adapters.clone().map(Arc::new),
        }
    }
}
