//! One virtual gateway replica: a real snapshot, real load cells, a real prefix index, and what it has scraped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::ReplayError;
use super::options::FleetShape;
use crate::bands::{self, Keeper};
use crate::clock::Tick;
use crate::fleet::{self, Engine, Model, Pod, PodKey, PodSpec, Role, Snapshot};
use crate::knobs::{Knobs, PdKnobs};
use crate::load::{PeerCell, Peers, Share, TokenView};
use crate::prefix::{PrefixIndex, PrefixUpdate};
use crate::rng::{Rng, Seeds};
use crate::routing::{self, Charges, Context, Decision, RequestFacts, RoutingError, Strategy};
use crate::scrape::{Derived, Page, in_flight};

/// The one model of a replay.
const MODEL: &str = "replayed";
/// How often offered prefixes are taken in, as in production.
const PREFIX_BEAT: Duration = Duration::from_millis(5);
/// How often bands are planned anew, as in production.
const BANDS_BEAT: Duration = Duration::from_secs(1);
/// Rates keep no samples that are closer together, so scrapes in between need not be made.
const NEEDED_SPACING: Duration = Duration::from_millis(250);
/// Rates keep no samples that are older.
const NEEDED_AGE: Duration = Duration::from_mins(3);

/// A modelled engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineId {
    /// A prefill engine, by its index.
    Prefill(usize),
    /// A decode engine, by its index.
    Decode(usize),
}

/// The scraping of one pod.
#[derive(Debug)]
struct Scrape {
    pod: Arc<Pod>,
    /// The first scrape.
    phase: Tick,
    /// How many intervals after it the last one was.
    last: Option<u64>,
    derived: Derived,
}

/// A gateway replica.
#[derive(Debug)]
pub(super) struct Gateway {
    model: Arc<Model>,
    knobs: PdKnobs,
    max_metric_age: Duration,
    scrape_interval: Duration,
    prefix: PrefixIndex,
    last_beat: Option<u64>,
    bands: Keeper,
    last_bands_beat: Option<u64>,
    seeds: Seeds,
    prefills: Vec<Scrape>,
    decodes: Vec<Scrape>,
    /// By slot.
    engines: Vec<EngineId>,
}

/// The clock of the shares, which all gateways agree on.
fn fleet_ms(now: Tick) -> u64 {
    now.0 / 1_000_000
}

fn spec(role: Role, index: usize, shape: FleetShape) -> PodSpec {
    let role_name = if role == Role::Prefill { "prefill" } else { "decode" };
    let name: Arc<str> = format!("{role_name}-{index:05}").into();
    PodSpec {
        key: PodKey { namespace: "replay".into(), name: Arc::clone(&name) },
        uid: name,
        restarts: 0,
        model: MODEL.into(),
        // Never dialled: `.invalid` resolves nowhere (RFC 2606).
        host: format!("{role_name}-{index}.invalid").into(),
        port: 8000,
        metric_port: 8000,
        engine: Engine::Vllm,
        kv_connector: None,
        bootstrap_port: 8998,
        role,
        roleset: Some(format!("roleset-{:05}", index % shape.rolesets).into()),
        replica_index: None,
        serves_http: true,
        pd: true,
        draining: false,
        tls: false,
        rank: 0,
        ready: true,
        terminating: false,
        labels: Arc::new(BTreeMap::from([("role-name".to_owned(), role_name.to_owned())])),
        config: None,
        also: Vec::new(),
        claim: None,
    }
}

impl Gateway {
    /// A replica that knows the fleet and nothing about its load. `knobs` are those of its requests.
    pub(super) fn new(shape: FleetShape, process: &Knobs, knobs: PdKnobs, seed: u64) -> Result<Gateway, ReplayError> {
        let of_role = |role, count| (0..count).map(move |index| spec(role, index, shape));
        let specs: Vec<PodSpec> =
            of_role(Role::Prefill, shape.prefill).chain(of_role(Role::Decode, shape.decode)).collect();
        let mut slots = 0;
        let snapshot = fleet::build(&Snapshot::default(), &specs, &mut slots);
        let model = Arc::clone(snapshot.model(MODEL).ok_or(ReplayError::Fleet)?);
        let mut rng = Rng::new(seed ^ 0x5ca1_ab1e);
        let mut engines = vec![EngineId::Prefill(0); slots as usize];
        let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
        // Ordered by key, and so, within a role, by index.
        for pod in &model.pods {
            let scrape = Scrape {
                pod: Arc::clone(pod),
                phase: Tick(0).plus(process.scrape.interval.mul_f64(rng.unit())),
                last: None,
                derived: Derived::default(),
            };
            let list = if pod.spec.role == Role::Prefill { &mut prefills } else { &mut decodes };
            let id = if pod.spec.role == Role::Prefill { EngineId::Prefill } else { EngineId::Decode };
            if let Some(engine) = engines.get_mut(pod.state.slot as usize) {
                *engine = id(list.len());
            }
            list.push(scrape);
        }
        let bands = Keeper::new(Arc::clone(&model.bands));
        Ok(Gateway {
            model,
            knobs,
            max_metric_age: process.scrape.max_age,
            scrape_interval: process.scrape.interval.max(Duration::from_millis(1)),
            prefix: PrefixIndex::new(&process.prefix),
            last_beat: None,
            bands,
            last_bands_beat: None,
            seeds: Seeds::new(seed),
            prefills,
            decodes,
            engines,
        })
    }

    /// The knobs of its requests.
    pub(super) fn knobs(&self) -> &PdKnobs {
        &self.knobs
    }

    /// The engine behind a pod.
    pub(super) fn engine_of(&self, pod: &Pod) -> Option<EngineId> {
        self.engines.get(pod.state.slot as usize).copied()
    }

    /// Scrapes a pod as often as it was due by `now`. Called before anything about the pod changes, so that `page` can
    /// still tell what the page said at a moment since the last change; and before a selection, so that scraping costs
    /// nothing while nobody looks.
    pub(super) fn scrape(&mut self, engine: EngineId, now: Tick, page: impl Fn(Tick) -> Page) {
        let scrape = match engine {
            EngineId::Prefill(index) => self.prefills.get_mut(index),
            EngineId::Decode(index) => self.decodes.get_mut(index),
        };
        if let Some(scrape) = scrape {
            scrape.catch_up(now, self.scrape_interval, page);
        }
    }

    /// Selects and charges. What comes of it is [noted](Gateway::note) when it is settled.
    pub(super) fn route(
        &mut self,
        now: Tick,
        facts: &RequestFacts<'_>,
        peers: Peers,
    ) -> Result<(Decision, Charges), RoutingError> {
        let beat = now.0 / PREFIX_BEAT.as_nanos() as u64;
        if self.last_beat != Some(beat) {
            self.last_beat = Some(beat);
            while self.prefix.drain(now).more {}
        }
        let bands_beat = now.0 / BANDS_BEAT.as_nanos() as u64;
        if self.last_bands_beat != Some(bands_beat) {
            self.last_bands_beat = Some(bands_beat);
            self.bands.refresh(&self.model, &self.knobs, now);
        }
        let (seed, max_metric_age) = (self.seeds.next(), self.max_metric_age);
        let context = Context { now, seed, max_metric_age, prefix: &self.prefix, peers };
        routing::select_and_charge(&self.model, facts, Strategy::Pd, &self.knobs, context)
    }

    /// Notes the length and the prefix of a request that it sent to the prefill engine `prefill`.
    pub(super) fn note(&mut self, prefill: usize, tokens: u64, hashes: &Arc<[u64]>) {
        if bands::enabled(&self.knobs) {
            self.model.bands.observe(tokens);
        }
        self.learn(prefill, hashes);
    }

    /// Notes a prefix that the prefill engine `prefill` is about to have.
    pub(super) fn learn(&mut self, prefill: usize, hashes: &Arc<[u64]>) {
        let Some(Scrape { pod, .. }) = self.prefills.get(prefill).filter(|_| !hashes.is_empty()) else { return };
        self.prefix.offer(PrefixUpdate {
            model: Arc::clone(&self.model.name),
            hashes: Arc::clone(hashes),
            pod: Arc::clone(&pod.state),
        });
    }

    /// This gateway among its peers.
    pub(super) fn peers(&self) -> &PeerCell {
        &self.model.peers
    }

    /// How many pods it knows; their slots are the numbers below that.
    pub(super) fn slots(&self) -> usize {
        self.engines.len()
    }

    /// Its own work on the pod in `slot`.
    pub(super) fn share(&self, slot: usize, now: Tick) -> Share {
        self.of_slot(slot).map_or(Share::ZERO, |pod| pod.state.load.share(now, fleet_ms(now)))
    }

    /// What all others have on these pods.
    pub(super) fn apply(&self, others: &[(usize, Share)], now: Tick) {
        for (slot, share) in others {
            if let Some(pod) = self.of_slot(*slot) {
                pod.state.load.remote.apply(share, now, fleet_ms(now));
            }
        }
    }

    /// What it has heard of all pods is still so.
    pub(super) fn confirm(&self, now: Tick) {
        for pod in &self.model.pods {
            pod.state.load.remote.confirm(now);
        }
    }

    /// The slots of a prefill and a decode engine.
    pub(super) fn slots_of(&self, prefill: usize, decode: usize) -> [Option<usize>; 2] {
        [self.prefills.get(prefill), self.decodes.get(decode)]
            .map(|scrape| scrape.map(|scrape| scrape.pod.state.slot as usize))
    }

    fn of_slot(&self, slot: usize) -> Option<&Arc<Pod>> {
        match *self.engines.get(slot)? {
            EngineId::Prefill(index) => self.prefills.get(index).map(|scrape| &scrape.pod),
            EngineId::Decode(index) => self.decodes.get(index).map(|scrape| &scrape.pod),
        }
    }

    /// What is still charged, summed over all pods: requests, and tokens in the ledgers.
    pub(super) fn open(&self) -> u64 {
        let of_pod = |pod: &Arc<Pod>| {
            let TokenView { active, kv, stranded, decode } = pod.state.load.tokens.view();
            let (waiting, _) = pod.state.load.tokens.decode_ages(Tick(u64::MAX));
            pod.state.load.view().in_flight() + active + kv + stranded + decode + waiting
        };
        self.model.pods.iter().map(of_pod).sum()
    }
}

impl Scrape {
    fn catch_up(&mut self, now: Tick, interval: Duration, page: impl Fn(Tick) -> Page) {
        if now < self.phase {
            return;
        }
        let interval_nanos = interval.as_nanos() as u64;
        let due = (now.0 - self.phase.0) / interval_nanos;
        let stride = (NEEDED_SPACING.as_nanos() as u64).div_ceil(interval_nanos).max(1);
        let oldest = due.saturating_sub(NEEDED_AGE.as_nanos() as u64 / interval_nanos);
        let mut turn = match self.last {
            Some(last) if last >= due => return,
            Some(last) => (last + stride).max(oldest).min(due),
            None => oldest,
        };
        let load = self.pod.state.load.total(now);
        loop {
            let at = Tick(self.phase.0 + turn * interval_nanos);
            let own = in_flight(load);
            let signals = self.derived.signals(&page(at), at, self.pod.spec.role, own, load.completed);
            if turn >= due {
                self.pod.state.signals.store(Arc::new(signals));
                break;
            }
            turn = (turn + stride).min(due);
        }
        self.last = Some(due);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::knobs::Environment;

    struct Nothing;

    impl Environment for Nothing {
        fn get(&self, _: &str) -> Option<String> {
            None
        }
    }

    fn gateway() -> Gateway {
        let (knobs, _) = Knobs::read(&Nothing).unwrap();
        let shape = FleetShape::new(2, 2, None).unwrap();
        Gateway::new(shape, &knobs, PdKnobs::default(), 3).unwrap()
    }

    const POD: EngineId = EngineId::Decode(1);

    /// 200 tokens per second, and twice as many after four seconds.
    fn page(at: Tick) -> Page {
        let seconds = at.0 as f64 / 1e9;
        let tokens = 200.0 * seconds + 200.0 * (seconds - 4.0).max(0.0);
        Page { running: Some(3.0), generation_tokens: Some(tokens), ..Page::default() }
    }

    fn signals(gateway: &Gateway) -> crate::fleet::Signals {
        gateway.decodes[1].pod.state.signals.load().as_ref().clone()
    }

    #[test]
    fn who_looks_rarely_sees_what_who_looks_always_sees() {
        let (mut often, mut rarely) = (gateway(), gateway());
        for ms in 0..10_000u64 {
            often.scrape(POD, Tick::from_millis(ms), page);
            if ms % 1_700 == 999 {
                rarely.scrape(POD, Tick::from_millis(ms), page);
                let (a, b) = (signals(&often), signals(&rarely));
                assert_eq!((a.at, a.running, a.foreign_running), (b.at, b.running, 3.0), "{ms}");
                let age = Tick::from_millis(ms).since(a.at.unwrap());
                assert!(age < Duration::from_millis(50), "{ms}: {age:?}");
                let rates = (a.generation_tps.unwrap(), b.generation_tps.unwrap());
                assert!((rates.0 / rates.1 - 1.0).abs() < 0.06, "{ms}: {rates:?}");
            }
        }
        assert!((signals(&rarely).generation_tps.unwrap() - 400.0).abs() < 1.0);
    }

    #[test]
    fn a_long_pause_costs_a_bounded_number_of_scrapes() {
        let mut gateway = gateway();
        gateway.scrape(POD, Tick::from_millis(1_000), page);
        let seen = RefCell::new(Vec::new());
        gateway.scrape(POD, Tick::from_millis(86_400_000), |at| {
            seen.borrow_mut().push(at);
            page(at)
        });
        let seen = seen.into_inner();
        assert!(seen.len() < 1_000 && seen.is_sorted(), "{}", seen.len());
        assert!(Tick::from_millis(86_400_000).since(*seen.last().unwrap()) < Duration::from_millis(50));
        gateway.scrape(POD, Tick::from_millis(86_400_000), |_| panic!("none is due"));
    }

    #[test]
    fn every_pod_has_its_engine() {
        let gateway = gateway();
        for (list, id) in
            [(&gateway.prefills, EngineId::Prefill as fn(usize) -> EngineId), (&gateway.decodes, EngineId::Decode)]
        {
            for (index, scrape) in list.iter().enumerate() {
                assert_eq!(gateway.engine_of(&scrape.pod), Some(id(index)));
                assert_eq!(scrape.pod.spec.roleset.as_deref(), Some(format!("roleset-0000{index}").as_str()));
            }
        }
        assert_eq!((gateway.prefills.len(), gateway.decodes.len(), gateway.open()), (2, 2, 0));
    }
}
