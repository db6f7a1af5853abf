//! A gateway with some variables set, and pods whose annotation has two profiles: `default`, and `tuned` with the
//! fields under test.

use std::any::Any;
use std::time::Duration;

use super::*;
use crate::fleet::{ModelConfig, Signals};
use crate::load::{DecodeCharge, PrefillCharge, TokenCharge};
use crate::prefix::{PrefixUpdate, block_hashes, tokenize};

/// Long enough for ten blocks of the default size.
pub(super) const PROMPT_BYTES: usize = 1280;

/// What is configured.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) variables: &'a [(&'a str, &'a str)],
    /// Members of `routingConfig` of the profile `tuned`.
    pub(super) field: &'a str,
    /// The profile that requests ask for.
    pub(super) profile: &'static str,
}

impl Environment for Given<'_> {
    fn get(&self, name: &str) -> Option<String> {
        // Of a variable that is given twice the last counts.
        self.variables.iter().rev().find(|(given, _)| *given == name).map(|(_, value)| (*value).to_owned())
    }

    fn host_name(&self) -> Option<String> {
        Some("host".to_owned())
    }
}

pub(super) struct Scene {
    pub(super) world: Arc<World>,
    profile: &'static str,
    held: Vec<Box<dyn Any>>,
    /// When the next request begins, milliseconds.
    pub(super) now: u64,
}

/// A pod: name, role, roleset, members of `routingConfig` of its own.
pub(super) type Member = (&'static str, Role, Option<&'static str>, &'static str);

/// Two prefill and two decode pods of one roleset.
pub(super) const TWO_AND_TWO: &[Member] = &[
    ("p0", Role::Prefill, Some("rs"), ""),
    ("p1", Role::Prefill, Some("rs"), ""),
    ("d0", Role::Decode, Some("rs"), ""),
    ("d1", Role::Decode, Some("rs"), ""),
];

impl Scene {
    pub(super) fn new(given: &Given<'_>, members: &[Member]) -> Scene {
        Scene::of(given, members, Engine::Vllm)
    }

    /// Pods of another engine.
    pub(super) fn of(given: &Given<'_>, members: &[Member], engine: Engine) -> Scene {
        let (knobs, _) = Knobs::read(given).unwrap();
        let specs: Vec<PodSpec> = members
            .iter()
            .map(|(name, role, roleset, own)| {
                let tuned: Vec<&str> = [*own, given.field].into_iter().filter(|text| !text.is_empty()).collect();
                let text = format!(
                    r#"{{"profiles": {{"default": {{"routingConfig": {{{own}}}}},
                                       "tuned": {{"routingConfig": {{{}}}}}}}}}"#,
                    tuned.join(",")
                );
                let (config, warnings) = ModelConfig::parse(&text, &knobs.pd);
                assert_eq!(warnings, Vec::<String>::new());
                PodSpec { config: Some(Arc::new(config.unwrap())), engine, ..spec(name, *role, *roleset) }
            })
            .collect();
        let fleet = Fleet::default();
        fleet.store(build(&Snapshot::default(), &specs, &mut 0));
        let metrics =
            Metrics::labelled(&knobs.gateway_pod, knobs.scrape.labels).with_ttft_threshold(knobs.ttft_threshold);
        let seed = knobs.prefix.hash_seed.unwrap_or(0);
        let world = Arc::new(World::new(
            Arc::new(knobs),
            Arc::new(fleet),
            Arc::new(metrics),
            WorldSeeds { hashes: seed, ..WorldSeeds::default() },
        ));
        Scene { world, profile: given.profile, held: Vec::new(), now: 1000 }
    }

    pub(super) fn pod(&self, name: &str) -> Arc<crate::fleet::Pod> {
        let model = Arc::clone(self.world.fleet.load().model("m").unwrap());
        Arc::clone(model.pods.iter().find(|pod| &*pod.spec.key.name == name).unwrap())
    }

    pub(super) fn tick(&self) -> Tick {
        Tick::from_millis(self.now)
    }

    /// So many prefill legs run on the pod.
    pub(super) fn prefills(mut self, name: &str, count: usize) -> Scene {
        let state = Arc::clone(&self.pod(name).state);
        self.held.extend((0..count).map(|_| Box::new(PrefillCharge::open(&state)) as Box<dyn Any>));
        self
    }

    /// So many requests run on the decode pod, which reports these signals.
    pub(super) fn decodes(mut self, name: &str, count: usize, signals: &Signals) -> Scene {
        let state = Arc::clone(&self.pod(name).state);
        self.held.extend((0..count).map(|_| Box::new(DecodeCharge::open(&state)) as Box<dyn Any>));
        state.signals.store(Arc::new(Signals { at: Some(self.tick()), ..signals.clone() }));
        self
    }

    /// Tokens charged to a prefill pod; those of a `done` prefill are not active any more.
    pub(super) fn tokens(mut self, name: &str, tokens: u64, done: bool) -> Scene {
        let charge = TokenCharge::prefill(&self.pod(name).state, tokens, self.tick(), Duration::ZERO);
        if done {
            charge.prefill_done(self.tick());
        }
        self.held.push(Box::new(charge));
        self
    }

    /// Tokens charged to a decode pod at that time.
    pub(super) fn decode_tokens(mut self, name: &str, tokens: u64, millis: u64) -> Scene {
        let at = Tick::from_millis(millis);
        self.held.push(Box::new(TokenCharge::decode(&self.pod(name).state, tokens, at, Duration::ZERO)));
        self
    }

    /// The pod has the first bytes of the prompt in its cache.
    pub(super) fn cached(self, name: &str, bytes: usize) -> Scene {
        let knobs = &self.world.knobs.prefix;
        let key = tokenize(knobs.tokenizer, &prompt(bytes).into_bytes()).into_owned();
        let hashes = block_hashes(&key, knobs.block_size, self.world.hash_seed.get());
        let pod = Arc::clone(&self.pod(name).state);
        self.world.prefix.offer(PrefixUpdate { model: Arc::from("m"), hashes: Arc::from(&hashes[..]), pod });
        self.world.prefix.drain(self.tick());
        self
    }

    /// A `pd` request with [`PROMPT_BYTES`] of prompt, up to its prefill leg.
    pub(super) fn ask(&self) -> Run {
        self.ask_with(&[("routing-strategy", "pd")], &prompt(PROMPT_BYTES))
    }

    pub(super) fn ask_with(&self, headers: &[(&'static str, &'static str)], prompt: &str) -> Run {
        self.ask_for(headers, &format!(r#"{{"model":"m","prompt":"{prompt}"}}"#))
    }

    pub(super) fn ask_for(&self, headers: &[(&'static str, &'static str)], body: &str) -> Run {
        self.ask_at("/v1/completions", headers, body)
    }

    pub(super) fn ask_at(&self, path: &str, headers: &[(&'static str, &'static str)], body: &str) -> Run {
        let mut run = Run::new(Arc::clone(&self.world));
        run.now = self.now;
        let mut all = headers.to_vec();
        all.push(("config-profile", self.profile));
        run.feed(head_of(path, Method::POST, &all, false));
        if !run.exchange.ended() {
            run.feed(sent(body.to_owned()));
        }
        run
    }
}

/// A prompt of so many bytes whose blocks all differ; a shorter one is the start of a longer one.
pub(super) fn prompt(bytes: usize) -> String {
    let mut text: String = (0..=bytes / 8).flat_map(|n| [format!("{n:07}"), " ".to_owned()]).collect();
    text.truncate(bytes);
    text
}

/// The prefill pod of a request.
pub(super) fn prefill_pod(run: &Run) -> String {
    run.exchange.record().prefill_pod.as_ref().map(|pod| pod.pod.clone()).unwrap_or_default()
}

/// The pod that answers it.
pub(super) fn decode_pod(run: &Run) -> String {
    run.exchange.record().target_pod.as_ref().map(|pod| pod.pod.clone()).unwrap_or_default()
}

/// The status of a refusal; 0 = it was not refused.
pub(super) fn refused(run: &Run) -> String {
    let status = run.effects.iter().find_map(|effect| match effect {
        Effect::Refuse(error) => Some(error.status.as_u16()),
        _ => None,
    });
    status.unwrap_or(0).to_string()
}

/// The call of the prefill leg.
pub(super) fn prefill_call(run: &Run) -> &crate::engines::leg::LegRequest {
    let call =
        run.effects.iter().find_map(|effect| if let Effect::StartPrefill(call) = effect { Some(call) } else { None });
    call.unwrap()
}

/// The metrics page has a line that begins and ends like this.
pub(super) fn page_has(world: &World, start: &str, end: &str) -> bool {
    let page = world.metrics.render(&crate::telemetry::FleetGauges::default(), Tick::from_millis(0));
    page.lines().any(|line| line.starts_with(start) && line.contains(end))
}
