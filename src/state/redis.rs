//! Calls to Redis: one typed function per script, and the feed of announcements. The only place that knows the client.
//!
//! - Nothing is ever sent twice by the client, nothing waits for a connection, nothing waits longer than its deadline, and
//!   the queue is bounded. A call that fails may still run on the server: the scripts are made for that.
//! - A server that does not know a script (restart, failover, `SCRIPT FLUSH`) gets its text with the same call.
//! - Silence of a connection that owes an answer ends it, by the client or by who calls. Reconnecting slows down, at random, and never gives up.
//! - Credentials do not show in `Debug` nor in errors.

mod counters;
mod feed;
mod members;
mod responses;
mod streams;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use fred::clients::Client;
use fred::error::{Error, ErrorKind};
use fred::interfaces::{ClientLike, EventInterface};
use fred::types::config::{
    Config, ConnectionConfig, Options, PerformanceConfig, ReconnectPolicy, Server, TcpConfig, UnresponsiveConfig,
};
use fred::types::{Builder, ClusterHash, ConnectHandle, CustomCommand, Value};
use futures_util::FutureExt;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

pub use counters::{Charged, Quota, Rate};
pub use feed::{FeedEvent, NewsFeed};
pub use streams::{Following, SketchCall, SketchReply, StreamId};

use super::codec::CodecError;
use super::keys::ModelKeys;
use super::scripts::{self, Script};
use super::wire::{ClaimCall, ClaimReply, ReapCall, ReapReply, SyncCall, SyncReply};

/// How often a cluster may send a call elsewhere.
const MAX_REDIRECTIONS: u32 = 3;

/// Why a call had no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedisError {
    /// The address cannot be used. The text does not repeat it: it may hold a password.
    #[error("REDIS_URL is not usable: {0}")]
    Address(String),
    /// No answer within the deadline. The script may have run.
    #[error("no answer within the deadline")]
    Late,
    /// There is no connection, or too much waits for it.
    #[error("not connected: {0}")]
    Down(String),
    /// The server, or the script, refused.
    #[error("refused: {0}")]
    Refused(String),
    /// The answer is not one of the script's.
    #[error("unreadable answer: {0}")]
    Unreadable(#[from] CodecError),
}

/// Where Redis is, and how patient to be with it.
#[derive(Clone)]
pub struct RedisConfig {
    target: Config,
    /// A connection attempt is given up after this.
    pub connect_timeout: Duration,
    /// A connection that owes an answer, and on which nothing was sent, for so long is closed.
    pub silence: Duration,
    /// Calls that may wait for the connection's writer.
    pub max_queued: usize,
    /// The first pause before a reconnect, in ms; it doubles, with up to 100 ms added at random.
    pub first_pause_ms: u32,
    /// The longest pause, in ms.
    pub last_pause_ms: u32,
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let servers: Vec<String> = self.target.server.hosts().iter().map(ToString::to_string).collect();
        f.debug_struct("RedisConfig")
            .field("servers", &servers)
            .field("tls", &self.target.tls.is_some())
            .field("password", &self.target.password.as_ref().map(|_| "***"))
            .finish_non_exhaustive()
    }
}

impl RedisConfig {
    /// From `REDIS_URL`: `redis://`, `rediss://` (TLS), `redis-cluster://`, `redis-sentinel://` (with
    /// `?sentinelServiceName=`), each also as `rediss-…`.
    pub fn from_url(url: &str) -> Result<RedisConfig, RedisError> {
        let target = Config::from_url(url).map_err(|error| RedisError::Address(error.kind().to_str().to_owned()))?;
        Ok(RedisConfig::to(target))
    }

    /// From `REDIS_HOST`, `REDIS_PORT` and `REDIS_PASSWORD`.
    pub fn from_parts(host: &str, port: u16, password: Option<&str>) -> RedisConfig {
        let server = fred::types::config::ServerConfig::new_centralized(host, port);
        RedisConfig::to(Config { server, password: password.map(str::to_owned), ..Config::default() })
    }

    fn to(target: Config) -> RedisConfig {
        RedisConfig {
            target: Config { fail_fast: false, ..target },
            // An attempt that begins just before the server is back, and the pause after it, still leave time to be
            // whole within 3 s.
            connect_timeout: Duration::from_secs(1),
            silence: Duration::from_secs(2),
            max_queued: 1_000,
            first_pause_ms: 20,
            last_pause_ms: 800,
        }
    }

    /// True when the target is a Redis Cluster.
    pub fn is_cluster(&self) -> bool {
        self.target.server.is_clustered()
    }

    fn client(&self) -> Result<Client, RedisError> {
        let mut builder = Builder::from_config(self.target.clone());
        builder.set_connection_config(ConnectionConfig {
            connection_timeout: self.connect_timeout,
            internal_command_timeout: self.connect_timeout,
            // What a node of a cluster sends elsewhere it has not done: the client counts it as an attempt, and with none
            // left it ends. Whatever else fails is not tried again, see `options`.
            max_command_attempts: if self.is_cluster() { 1 + MAX_REDIRECTIONS } else { 1 },
            max_redirections: MAX_REDIRECTIONS,
            max_command_buffer_len: self.max_queued,
            reconnect_on_auth_error: true,
            auto_client_setname: false,
            unresponsive: UnresponsiveConfig { max_timeout: Some(self.silence), interval: self.silence / 4 },
            tcp: TcpConfig { nodelay: Some(true), ..TcpConfig::default() },
            ..ConnectionConfig::default()
        });
        builder.set_performance_config(PerformanceConfig {
            default_command_timeout: self.silence,
            broadcast_channel_capacity: 1_024,
            ..PerformanceConfig::default()
        });
        builder.set_policy(ReconnectPolicy::new_exponential(0, self.first_pause_ms, self.last_pause_ms, 2));
        builder.build().map_err(|error| RedisError::Address(error.kind().to_str().to_owned()))
    }
}

/// Bytes since the start.
#[derive(Debug, Default)]
struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

/// A connection to Redis that comes and goes. Cloning is cheap, and shares it.
#[derive(Clone)]
pub struct Plane {
    client: Client,
    runner: Arc<Runner>,
    traffic: Arc<Traffic>,
    announce: &'static str,
    digests: [(Script, String); scripts::ALL.len()],
}

impl fmt::Debug for Plane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plane").field("state", &self.client.state()).finish_non_exhaustive()
    }
}

impl Plane {
    /// Begins to connect, and does not wait for that. To be called within a runtime.
    pub fn connect(config: &RedisConfig) -> Result<Plane, RedisError> {
        let client = config.client()?;
        // The task belongs to the client, and ends with `Plane::close`.
        let runner = Arc::new(Runner::start(&client));
        Ok(Plane {
            client,
            runner,
            traffic: Arc::default(),
            announce: if config.is_cluster() { "SPUBLISH" } else { "PUBLISH" },
            digests: scripts::ALL.map(|script| (script, fred::util::sha1_hash(script.text))),
        })
    }

    /// Bytes of arguments sent, and of the ledger's answers received, since the start.
    pub fn traffic(&self) -> (u64, u64) {
        (self.traffic.sent.load(Ordering::Relaxed), self.traffic.received.load(Ordering::Relaxed))
    }

    /// There is a connection now.
    pub fn is_connected(&self) -> bool {
        self.client.is_connected()
    }

    /// Told each time that a connection was made anew.
    pub fn reconnects(&self) -> Reconnects {
        Reconnects(self.client.reconnect_rx())
    }

    /// Replaces the connection, for calls are not answered on it. The client notices a silent connection only when it
    /// has nothing to send, which never is for long.
    pub fn reconnect(&self) {
        self.runner.reconnect(&self.client);
    }

    /// The client has given up: nothing is answered before [`Plane::reconnect`].
    pub fn has_ended(&self) -> bool {
        self.runner.has_ended()
    }

    /// Ends the connection and its task.
    pub async fn close(&self) {
        // Without a connection there is nothing to say goodbye to.
        let _ = tokio::time::timeout(Duration::from_millis(500), self.client.quit()).await;
    }

    /// Runs a script.
    async fn call(
        &self,
        script: Script,
        keys: &[&str],
        arguments: &[Vec<u8>],
        deadline: Duration,
    ) -> Result<Value, RedisError> {
        let sent: usize = keys.iter().map(|key| key.len()).chain(arguments.iter().map(Vec::len)).sum();
        self.traffic.sent.fetch_add(sent as u64, Ordering::Relaxed);
        let both = async {
            match self.run("EVALSHA", self.digest(script), keys, arguments, deadline).await {
                // The text goes along instead of being loaded first: nothing can forget it in between.
                Err(error) if error.details().starts_with("NOSCRIPT") => {
                    self.run("EVAL", script.text, keys, arguments, deadline).await
                }
                other => other,
            }
        };
        match tokio::time::timeout(deadline, both).await {
            Err(_) => Err(RedisError::Late),
            Ok(Err(error)) => Err(failure(&error)),
            Ok(Ok(value)) => {
                if let Value::Bytes(bytes) = &value {
                    self.traffic.received.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                }
                Ok(value)
            }
        }
    }

    fn digest(&self, script: Script) -> &str {
        self.digests.iter().find(|(known, _)| *known == script).map_or("", |(_, digest)| digest.as_str())
    }

    async fn run(
        &self,
        command: &'static str,
        body: &str,
        keys: &[&str],
        arguments: &[Vec<u8>],
        deadline: Duration,
    ) -> Result<Value, Error> {
        let mut words: Vec<Value> = Vec::with_capacity(2 + keys.len() + arguments.len());
        words.push(body.into());
        words.push(keys.len().to_string().into());
        words.extend(keys.iter().map(|key| Value::from(*key)));
        words.extend(arguments.iter().map(|argument| Value::Bytes(Bytes::copy_from_slice(argument))));
        // In a cluster the keys, which share a slot, say which node it is. Of what the client can do to find it, only this
        // works for commands that it does not know.
        let node = keys
            .first()
            .map_or(ClusterHash::Random, |key| ClusterHash::Custom(fred::util::redis_keyslot(key.as_bytes())));
        let command = CustomCommand::new_static(command, node, false);
        self.client.with_options(&options(deadline)).custom(command, words).await
    }

    /// `ledger_sync.lua`.
    pub async fn ledger_sync(
        &self,
        keys: &ModelKeys,
        call: &SyncCall,
        deadline: Duration,
    ) -> Result<SyncReply, RedisError> {
        let [head, shares] = call.arguments()?;
        let arguments = [head, shares, self.announce.into()];
        let reply = bytes(self.call(scripts::LEDGER_SYNC, &keys.ledger(), &arguments, deadline).await?)?;
        Ok(SyncReply::read(&reply)?)
    }

    /// `ledger_reap.lua`.
    pub async fn ledger_reap(
        &self,
        keys: &ModelKeys,
        call: &ReapCall,
        deadline: Duration,
    ) -> Result<ReapReply, RedisError> {
        let arguments = [call.argument()?, self.announce.into()];
        let reply = bytes(self.call(scripts::LEDGER_REAP, &keys.ledger(), &arguments, deadline).await?)?;
        Ok(ReapReply::read(&reply)?)
    }

    /// `claim.lua`.
    pub async fn claim(
        &self,
        keys: &ModelKeys,
        call: &ClaimCall,
        deadline: Duration,
    ) -> Result<ClaimReply, RedisError> {
        let [head, shares, rested_on] = call.arguments()?;
        let arguments = [head, shares, rested_on, self.announce.into()];
        let reply = bytes(self.call(scripts::CLAIM, &keys.ledger(), &arguments, deadline).await?)?;
        Ok(ClaimReply::read(&reply)?)
    }
}

/// The task of a client. It ends with the client, or when the client meets something that it does not expect.
#[derive(Debug)]
struct Runner(Mutex<ConnectHandle>);

impl Runner {
    fn start(client: &Client) -> Runner {
        Runner(Mutex::new(client.connect()))
    }

    fn has_ended(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_finished()
    }

    /// Has the client end its connection and make another one, with its usual pauses if need be.
    fn reconnect(&self, client: &Client) {
        let mut task = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if task.is_finished() {
            *task = client.connect();
        } else {
            // The first poll tells it so; how it goes is heard elsewhere.
            let _ = client.force_reconnection().now_or_never();
        }
    }
}

fn options(deadline: Duration) -> Options {
    Options { timeout: Some(deadline), fail_fast: true, ..Options::default() }
}

/// An answer that is one string of bytes.
fn bytes(value: Value) -> Result<Bytes, RedisError> {
    match value {
        Value::Bytes(bytes) => Ok(bytes),
        Value::String(text) => Ok(Bytes::copy_from_slice(text.as_bytes())),
        _ => Err(RedisError::Unreadable(CodecError::Foreign)),
    }
}

fn failure(error: &Error) -> RedisError {
    let text = || error.details().chars().take(200).collect::<String>();
    match error.kind() {
        ErrorKind::Timeout => RedisError::Late,
        ErrorKind::IO | ErrorKind::Canceled | ErrorKind::Backpressure | ErrorKind::Routing => RedisError::Down(text()),
        // These may repeat what was sent as credentials.
        ErrorKind::Auth | ErrorKind::Config | ErrorKind::Url => RedisError::Down(error.kind().to_str().to_owned()),
        _ => RedisError::Refused(text()),
    }
}

/// Says when a connection was made anew.
#[derive(Debug)]
pub struct Reconnects(Receiver<Server>);

impl Reconnects {
    /// Waits for the next one; `None` when the plane was closed.
    pub async fn next(&mut self) -> Option<()> {
        match self.0.recv().await {
            Ok(_) | Err(RecvError::Lagged(_)) => Some(()),
            Err(RecvError::Closed) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_every_form() {
        for (url, servers, cluster, tls) in [
            ("redis://h:7000", 1, false, false),
            ("redis://h", 1, false, false),
            ("redis://user:pw@h:7000/2", 1, false, false),
            ("rediss://h", 1, false, true),
            ("redis-cluster://a:1?node=b:2&node=c:3", 3, true, false),
            ("redis-sentinel://a:1?node=b:2&sentinelServiceName=main", 2, false, false),
        ] {
            let config = RedisConfig::from_url(url).unwrap();
            let found = (config.target.server.hosts().len(), config.is_cluster(), config.target.tls.is_some());
            assert_eq!(found, (servers, cluster, tls), "{url}");
        }
        for url in ["", "h:6379", "redis://", "redis://h/notanumber"] {
            assert!(RedisConfig::from_url(url).is_err(), "{url}");
        }
        assert!(RedisConfig::from_parts("h", 1, None).target.password.is_none());
    }

    #[test]
    fn passwords_do_not_show() {
        let config = RedisConfig::from_url("redis://user:hunter2@h:1").unwrap();
        assert!(!format!("{config:?}").contains("hunter2"), "{config:?}");
        let config = RedisConfig::from_parts("h", 1, Some("hunter2"));
        assert_eq!(config.target.password.as_deref(), Some("hunter2"));
        assert!(!format!("{config:?}").contains("hunter2"), "{config:?}");
        let error = RedisConfig::from_url("redis://user:hunter2@h:notaport").unwrap_err();
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }

    #[test]
    fn the_four_traps_are_closed() {
        let client = RedisConfig::from_parts("h", 1, None).client().unwrap();
        let config = client.connection_config();
        assert_eq!(config.max_command_attempts, 1);
        assert!(config.max_command_buffer_len > 0);
        assert!(config.unresponsive.max_timeout.is_some());
        assert!(!client.perf_config().default_command_timeout.is_zero());
        assert!(client.client_reconnect_policy().is_some());
    }

    #[tokio::test]
    async fn without_a_server_a_call_fails_at_once() {
        // A port that was free a moment ago.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let plane = Plane::connect(&RedisConfig::from_parts("127.0.0.1", port, None)).unwrap();
        let call = SyncCall::default();
        let reply = plane.ledger_sync(&ModelKeys::new("m"), &call, Duration::from_secs(5)).await;
        assert!(matches!(reply, Err(RedisError::Down(_) | RedisError::Late)), "{reply:?}");
        plane.close().await;
    }

    #[tokio::test]
    async fn a_client_that_has_ended_is_started_again() {
        let plane = Plane::connect(&RedisConfig::from_parts("127.0.0.1", 1, None)).unwrap();
        plane.reconnect();
        assert!(!plane.has_ended(), "it tries on and on");
        plane.runner.0.lock().unwrap().abort();
        while !plane.has_ended() {
            tokio::task::yield_now().await;
        }
        plane.reconnect();
        assert!(!plane.has_ended());
        plane.close().await;
    }

    #[test]
    fn r68_only_a_cluster_may_send_a_call_elsewhere() {
        for (url, attempts) in [("redis://h", 1), ("redis-cluster://h", 1 + MAX_REDIRECTIONS)] {
            let client = RedisConfig::from_url(url).unwrap().client().unwrap();
            assert_eq!(client.connection_config().max_command_attempts, attempts, "{url}");
            // What a lost connection owed is not sent again, however many attempts are left.
            let options = options(Duration::from_millis(1));
            assert!(options.fail_fast && options.max_attempts.is_none());
        }
    }
}
