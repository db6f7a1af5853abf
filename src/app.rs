//! The composition root: builds everything, passes it in, spawns into task trackers, stops in order.

mod listen;
mod plane;
mod sources;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::{self, AdminState, Readiness};
use crate::bands::{self, Keepers};
use crate::clock::Clock;
use crate::discovery::{DepartedListener, FleetBuilder};
use crate::drive::{Driver, Stops};
use crate::exchange::{World, WorldSeeds};
use crate::ext_proc::Processor;
use crate::fleet::{Engine, Fleet};
use crate::front;
use crate::knobs::{Knobs, PdKnobs, Report};
use crate::prefix::PrefixIndex;
use crate::rng::Seeds;
use crate::scrape::{self, HttpPages, ScrapeObserver, Scraper};
use crate::state::identity::{self, ReplicaIdentity};
use crate::state::limits::{LimitParts, SharedLimits};
use crate::state::links::{Listeners, Surroundings};
use crate::state::responses::Responses;
use crate::telemetry::{Metrics, PodLabels, PrefixIndexStats, Tracer, Tracing};
use crate::tls::Incoming;

pub use sources::Source;
use sources::Sources;

/// HTTP/2 flow-control window of one ext_proc stream, bytes: a 1 MiB prompt arrives without waiting for a round trip.
const STREAM_WINDOW: u32 = 1 << 20;
/// The same for one connection from Envoy, which carries thousands of streams.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Dead Envoys are noticed this fast.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// The gRPC health service name that the reference gateway registers.
const HEALTH_SERVICE: &str = "gateway-plugin";
/// How often offered prefix entries are taken in: far below the time in which a follow-up request can come.
const PREFIX_BEAT: Duration = Duration::from_millis(5);
/// How often observed prompt lengths are taken in.
const BANDS_BEAT: Duration = Duration::from_secs(1);
/// How often the janitor looks for token charges whose time is over. (The reference looks once a minute.)
const JANITOR_BEAT: Duration = Duration::from_secs(1);
/// How many of these beats pass between two looks at the session table.
const SESSION_BEATS: u64 = 60;
/// How long streams that were opened before the listener closed have to send their request.
const LAST_HEADS: Duration = Duration::from_secs(1);
/// How long tasks may take to end after they have been cut.
const CUT_GRACE: Duration = Duration::from_secs(2);

/// What to serve, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// ext_proc listener, `host:port`; an empty host means every address.
    pub grpc: String,
    /// Admin listener.
    pub http: String,
    /// HTTP front listener; `None` = off.
    pub front: Option<String>,
    /// Pods.
    pub source: Source,
}

/// The addresses that were bound.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// ext_proc.
    pub grpc: SocketAddr,
    /// Admin.
    pub http: SocketAddr,
    /// Front.
    pub front: Option<SocketAddr>,
}

/// A running gateway replica.
#[derive(Debug)]
pub struct Gateway {
    addresses: Addresses,
    knobs: Arc<Knobs>,
    readiness: Arc<Readiness>,
    health: tonic_health::server::HealthReporter,
    world: Arc<World>,
    /// What this replica goes by among the others of its Redis.
    identity: Option<Arc<ReplicaIdentity>>,
    /// Requests and the connections that carry them.
    exchanges: TaskTracker,
    /// Discovery, scraping, admin: whatever serves until the end.
    background: TaskTracker,
    stop_accepting: CancellationToken,
    stops: Stops,
    stop_background: CancellationToken,
}

impl Gateway {
    /// Binds, builds and starts everything.
    pub async fn start(options: Options, knobs: Knobs, report: Report, tracing: Option<&Tracing>) -> Result<Gateway> {
        let clock = Clock::system();
        let knobs = Arc::new(knobs);
        let metrics = Metrics::labelled(&knobs.gateway_pod, knobs.scrape.labels);
        let metrics = Arc::new(metrics.with_ttft_threshold(knobs.ttft_threshold));
        metrics.set_config_errors(report.config_errors);
        metrics.set_limits(knobs.limits.max_streams, knobs.limits.max_buffered_bytes);
        let fleet = Arc::new(Fleet::default());
        let background = TaskTracker::new();
        let stop_background = CancellationToken::new();

        let tls = listen::Tls::load(&knobs.tls, options.front.is_some(), &metrics, clock)?;
        let engine_tls = listen::engine_tls(&knobs.tls.engines)?;
        let grpc = Incoming::new(bind(&options.grpc).await?, tls.grpc.clone());
        let http = Incoming::new(bind(&options.http).await?, tls.http.clone());
        let front = match &options.front {
            Some(address) => Some(Incoming::new(bind(address).await?, tls.front.clone())),
            None => None,
        };
        background.spawn(tls.watch(background.clone(), stop_background.clone()));
        let addresses = Addresses {
            grpc: grpc.local_addr()?,
            http: http.local_addr()?,
            front: front.as_ref().map(Incoming::local_addr).transpose()?,
        };

        let random = || uuid::Uuid::new_v4().as_u64_pair().0;
        let seeds = WorldSeeds {
            hashes: knobs.prefix.hash_seed.unwrap_or_else(random),
            attempts: random(),
            machine: (random() % u64::from(identity::NUMBERS)) as u16,
        };
        let world = World::new(Arc::clone(&knobs), Arc::clone(&fleet), Arc::clone(&metrics), seeds);
        let exchanges = TaskTracker::new();
        let mut world = world.at_epoch_ms(clock.epoch_ms());
        let prefix = Arc::clone(&world.prefix);
        let builder = FleetBuilder::new(Arc::clone(&fleet), vec![forget_departed(&prefix)]);
        let builder = Arc::new(builder.with_memory(clock, knobs.models.memory));
        let redis = plane::connect(&knobs.plane)?;
        let tracer = tracing.map_or_else(Tracer::off, Tracing::tracer);
        let around = Surroundings {
            fleet: Arc::clone(&fleet),
            snapshots: builder.subscribe(),
            metrics: Arc::clone(&metrics),
            clock,
            tracer: tracer.clone(),
            listeners: Listeners {
                prefix: Arc::clone(&prefix),
                sessions: Arc::clone(&world.sessions),
                users: Arc::clone(&world.users),
                vtc: knobs.pd.strategies.vtc,
                ejection: knobs.ejection,
            },
            seed: random(),
        };
        if let Some((connection, _)) = &redis {
            let parts = LimitParts {
                fallback: knobs.plane.rate_fallback,
                wait: knobs.plane.rate_wait,
                replica: uuid::Uuid::new_v4().to_string(),
                clock,
                metrics: Arc::clone(&metrics),
                tasks: exchanges.clone(),
            };
            let limits = SharedLimits::new(connection.clone(), parts);
            background.spawn(Arc::clone(&limits).keep_census(stop_background.clone()));
            let responses = Responses::new(knobs.api.response_ttl);
            let responses = responses.shared(connection.clone(), clock, exchanges.clone());
            world = world.with_limits(limits).with_responses(responses);
        }
        let world = Arc::new(world.with_plane(plane::start(redis.as_ref(), &knobs.plane, around)?));
        let identity = redis.as_ref().map(|(connection, _)| {
            let identity = Arc::new(ReplicaIdentity::new(connection.clone(), uuid::Uuid::new_v4().to_string()));
            background.spawn(plane::keep_identity(Arc::clone(&identity), Arc::clone(&world), stop_background.clone()));
            identity
        });
        let readiness = Arc::new(Readiness::default());
        let sources = Sources {
            builder: Arc::clone(&builder),
            knobs: Arc::clone(&knobs),
            metrics: Arc::clone(&metrics),
            clock,
            seed: random(),
        };
        let cluster = sources.start(&options.source, &background, &stop_background).await?;

        let (stop_accepting, stops) = (CancellationToken::new(), Stops::default());
        let seeds = Seeds::new(random());
        let driver = Driver::new(Arc::clone(&world), clock, seeds, tracer, exchanges.clone(), stops.clone());
        let driver = Arc::new(driver.with_engine_tls(engine_tls.clone()));

        background.spawn(sweep_token_charges(Arc::clone(&world), clock, stop_background.clone()));
        background.spawn(keep_prefix_index(prefix, clock, stop_background.clone()));
        background.spawn(note_snapshots(builder.subscribe(), Arc::clone(&metrics), clock, stop_background.clone()));
        background.spawn(keep_bands(Arc::clone(&fleet), Arc::clone(&knobs.pd), clock, stop_background.clone()));
        let scraper = Arc::new(Scraper {
            knobs: knobs.scrape.clone(),
            pages: HttpPages::new(&knobs.scrape, engine_tls),
            observer: CountScrapes(Arc::clone(&metrics)),
            clock,
            seed: random(),
        });
        scrape::start(scraper, Arc::clone(&fleet), builder.subscribe(), &background, stop_background.clone());

        let spans_dropped = tracing.map(Tracing::dropped_counter);
        let (problems, held) = (Arc::clone(&builder), Arc::clone(&world));
        let state = AdminState {
            replica: knobs.gateway_pod.as_str().into(),
            token: knobs.admin_token.clone(),
            fleet: Arc::clone(&fleet),
            metrics: Arc::clone(&metrics),
            readiness: Arc::clone(&readiness),
            problems: Arc::new(move || problems.problems().texts.into_iter().chain(tls.problems()).collect()),
            journal: Arc::clone(&world.journal),
            report: Arc::new(report),
            clock,
            max_metric_age: knobs.scrape.max_age,
            plane: Arc::clone(&world.plane),
            cluster: cluster.clone(),
            exposing: Arc::new(Semaphore::new(1)),
            before_metrics: Arc::new(move |metrics| {
                if let Some(cluster) = &cluster {
                    metrics.set_kubernetes(&cluster.gauges());
                }
                metrics.set_buffered_bytes(held.buffered.used() as u64);
                metrics.set_sessions(held.sessions.len() as u64);
                metrics.set_unserved(&held.unserved(clock.now()));
                let index = held.prefix.stats();
                metrics.set_prefix_index(PrefixIndexStats {
                    entries: index.entries,
                    bytes: index.bytes,
                    evictions: index.evictions,
                    dropped_updates: index.dropped_updates,
                });
                metrics.set_band_ends(&bands::ends(&held.fleet.load()));
                if let Some(dropped) = &spans_dropped {
                    metrics.set_spans_dropped(dropped());
                }
            }),
        };
        let router = admin::router(state);
        let stopped = stop_background.clone();
        background.spawn(async move {
            let served = axum::serve(listen::Pages(http), router)
                .with_graceful_shutdown(async move { stopped.cancelled().await });
            if let Err(error) = served.await {
                tracing::error!(%error, "the admin server ended");
            }
        });

        let (health, health_service) = tonic_health::server::health_reporter();
        set_serving(&health, builder.primed()).await;
        let (reporter, ready) = (health.clone(), Arc::clone(&readiness));
        background.spawn(serve_when_primed(reporter, ready, builder.subscribe(), stop_background.clone()));
        let server = tonic::transport::Server::builder()
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .add_service(health_service)
            .add_service(Processor::service(Arc::clone(&driver)));
        let stopped = stop_accepting.clone();
        background.spawn(async move {
            if let Err(error) =
                server.serve_with_incoming_shutdown(listen::streams(grpc), stopped.cancelled_owned()).await
            {
                tracing::error!(%error, "the ext_proc server ended");
            }
        });
        if let Some(listener) = front {
            let models = Arc::new(move |id: Option<&str>| admin::models_answer(&fleet.load(), id));
            background.spawn(front::serve(listener, driver, models, exchanges.clone(), stop_accepting.clone()));
        }
        Ok(Gateway {
            addresses,
            knobs,
            readiness,
            health,
            world,
            identity,
            exchanges,
            background,
            stop_accepting,
            stops,
            stop_background,
        })
    }

    /// The addresses that were bound.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// What its exchanges share.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// Goes away without losing a request: readiness off while still serving, so that Envoy's health checks notice;
    /// then no new streams, and an end to those without a request; running ones may end; what is left after the drain
    /// timeout is cut.
    pub async fn drain(self) {
        self.readiness.drain();
        set_serving(&self.health, false).await;
        tracing::info!(
            propagation_s = self.knobs.drain.propagation.as_secs_f64(),
            timeout_s = self.knobs.drain.timeout.as_secs_f64(),
            "draining"
        );
        tokio::time::sleep(self.knobs.drain.propagation).await;
        self.stop_accepting.cancel();
        self.exchanges.close();
        let all_ended = async {
            if tokio::time::timeout(LAST_HEADS, self.exchanges.wait()).await.is_err() {
                self.stops.idle.cancel();
                self.exchanges.wait().await;
            }
        };
        if tokio::time::timeout(self.knobs.drain.timeout, all_ended).await.is_err() {
            tracing::warn!(streams = self.world.streams.used(), "the drain timeout has passed; cutting what is left");
            self.stops.cut.cancel();
            let _ = tokio::time::timeout(CUT_GRACE, self.exchanges.wait()).await;
        }
        if let Some(limits) = &self.world.limits {
            limits.leave().await;
        }
        if let Some(identity) = &self.identity {
            identity.leave().await;
        }
        // This closes the connection.
        self.world.plane.leave().await;
        self.stop_background.cancel();
        self.background.close();
        // A connection that Envoy keeps open without a stream must not hold the process.
        let _ = tokio::time::timeout(CUT_GRACE, self.background.wait()).await;
        tracing::info!("stopped");
    }
}

async fn set_serving(health: &tonic_health::server::HealthReporter, serving: bool) {
    let status = if serving { tonic_health::ServingStatus::Serving } else { tonic_health::ServingStatus::NotServing };
    health.set_service_status(HEALTH_SERVICE, status).await;
    health.set_service_status("", status).await;
}

/// Before the first snapshot of the fleet, Envoy's health checks must not find this replica fit: it would answer that it
/// knows no model.
async fn serve_when_primed(
    health: tonic_health::server::HealthReporter,
    readiness: Arc<Readiness>,
    mut versions: tokio::sync::watch::Receiver<u64>,
    stop: CancellationToken,
) {
    tokio::select! {
        primed = versions.wait_for(|version| *version > 0) => if primed.is_err() { return },
        () = stop.cancelled() => return,
    }
    if readiness.is_draining() {
        return;
    }
    set_serving(&health, true).await;
    if readiness.is_draining() {
        set_serving(&health, false).await;
    }
}

/// `:port` (Go's spelling of "every address") tries IPv6 with IPv4 first and IPv4 alone when there is no IPv6.
async fn bind(address: &str) -> Result<TcpListener> {
    let bound = match address.strip_prefix(':') {
        Some(port) => match TcpListener::bind(format!("[::]:{port}")).await {
            Ok(listener) => Ok(listener),
            Err(_) => TcpListener::bind(format!("0.0.0.0:{port}")).await,
        },
        None => TcpListener::bind(address).await,
    };
    bound.with_context(|| format!("cannot listen on {address}"))
}

/// Pods that left take their prefix entries with them.
fn forget_departed(prefix: &Arc<PrefixIndex>) -> DepartedListener {
    let prefix = Arc::clone(prefix);
    Arc::new(move |departed| departed.iter().for_each(|pod| prefix.forget(pod.slot)))
}

/// Keeps the age of the snapshot honest.
async fn note_snapshots(
    mut versions: tokio::sync::watch::Receiver<u64>,
    metrics: Arc<Metrics>,
    clock: Clock,
    stop: CancellationToken,
) {
    metrics.snapshot_stored(clock.now());
    loop {
        tokio::select! {
            changed = versions.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            () = stop.cancelled() => return,
        }
        metrics.snapshot_stored(clock.now());
    }
}

struct CountScrapes(Arc<Metrics>);

impl ScrapeObserver for CountScrapes {
    fn fail(&self, pod: &PodLabels) {
        self.0.scrape_failed(pod);
    }

    fn missing(&self, engine: Engine, metric: &'static str) {
        self.0.engine_metric_missing(engine.name(), metric);
    }

    fn not_kept(&self) {
        self.0.engine_page_dropped();
    }
}

/// Applies what selections offered to the prefix index, which has one writer.
async fn keep_prefix_index(prefix: Arc<PrefixIndex>, clock: Clock, stop: CancellationToken) {
    let mut beat = tokio::time::interval(PREFIX_BEAT);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = beat.tick() => {}
            () = stop.cancelled() => return,
        }
        while prefix.drain(clock.now()).more {
            tokio::task::yield_now().await;
        }
    }
}

/// Turns observed prompt lengths into plans for bucket serving.
async fn keep_bands(fleet: Arc<Fleet>, knobs: Arc<PdKnobs>, clock: Clock, stop: CancellationToken) {
    let mut beat = tokio::time::interval(BANDS_BEAT);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut keepers = Keepers::default();
    loop {
        tokio::select! {
            _ = beat.tick() => keepers.refresh(&fleet.load(), &knobs, clock.now()),
            () = stop.cancelled() => return,
        }
    }
}

/// The janitor of the token ledgers. A force-release means that a release was lost, which should not happen.
async fn sweep_token_charges(world: Arc<World>, clock: Clock, stop: CancellationToken) {
    let mut beats = 0u64;
    let mut beat = tokio::time::interval(JANITOR_BEAT);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = beat.tick() => {}
            () = stop.cancelled() => return,
        }
        beats += 1;
        if beats.is_multiple_of(SESSION_BEATS) {
            world.sessions.sweep(clock.now());
        }
        world.sweep_token_charges(clock.now());
    }
}
