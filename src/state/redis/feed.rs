//! The announcements of the ledgers, on a connection of their own.
//!
//! A connection that only listens looks the same when the other side is gone. So it is asked from time to time whether it
//! lives, and replaced when it does not; and what could not be subscribed is subscribed later.

use std::fmt;
use std::time::Duration;

use fred::clients::Client;
use fred::error::Error;
use fred::interfaces::{ClientLike, EventInterface, PubsubInterface};
use fred::types::config::Server;
use fred::types::{ClusterHash, CustomCommand, Key, Message, Value};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Interval, MissedTickBehavior};

use super::{RedisConfig, RedisError, Runner, options};
use crate::state::keys::ModelKeys;
use crate::state::wire::News;

/// How often the connection is asked whether it lives.
const BEAT: Duration = Duration::from_secs(1);
/// How long the answer may take.
const ANSWER: Duration = Duration::from_secs(1);
/// Answers in a row that have to be missing for the connection to be replaced.
const MISSES: u32 = 2;
/// Channels of a cluster that are subscribed anew at each beat. That is the question there: every node has to answer, and
/// one that has given a slot away sends us to the one that has it now.
const RENEWED: usize = 16;

/// What a [`NewsFeed`] brings.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedEvent {
    /// An announcement on a channel.
    News(String, News),
    /// Announcements may have been missed.
    Gap,
}

/// What is under way beside listening.
#[derive(Clone, Copy, Debug)]
enum Done {
    /// Everything was subscribed, or not.
    Subscribed(bool),
    /// The connection lives, or seems not to.
    Asked(bool),
}

/// The announcements of some models' ledgers, on a connection of its own.
pub struct NewsFeed {
    client: Client,
    runner: Runner,
    channels: Vec<String>,
    sharded: bool,
    messages: Receiver<Message>,
    reconnects: Receiver<Server>,
    work: Option<BoxFuture<'static, Done>>,
    beat: Interval,
    /// Some channels may not be subscribed.
    incomplete: bool,
    misses: u32,
    /// The channel to renew next.
    turn: usize,
}

impl fmt::Debug for NewsFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewsFeed").field("channels", &self.channels.len()).finish_non_exhaustive()
    }
}

impl NewsFeed {
    /// Begins to connect, and does not wait for that. To be called within a runtime.
    pub fn connect(config: &RedisConfig) -> Result<NewsFeed, RedisError> {
        let client = config.client()?;
        let (messages, reconnects) = (client.message_rx(), client.reconnect_rx());
        let runner = Runner::start(&client);
        let mut beat = tokio::time::interval(BEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(NewsFeed {
            client,
            runner,
            channels: Vec::new(),
            sharded: config.is_cluster(),
            messages,
            reconnects,
            work: None,
            beat,
            incomplete: false,
            misses: 0,
            turn: 0,
        })
    }

    /// Listens to these models from now on, besides those before.
    pub async fn add<'a>(&mut self, models: impl Iterator<Item = &'a ModelKeys>) {
        let fresh: Vec<String> =
            models.map(|keys| keys.news().to_owned()).filter(|channel| !self.channels.contains(channel)).collect();
        self.channels.extend(fresh.iter().cloned());
        // What fails now is asked for again with the next connection, or the next beat. Shortly before there is a
        // connection, this waits for it.
        self.incomplete |= !subscribed(self.client.clone(), self.sharded, fresh).await;
    }

    /// Waits for the next event; `None` when the feed was closed. May be dropped while it waits.
    pub async fn next(&mut self) -> Option<FeedEvent> {
        loop {
            let work = &mut self.work;
            let done = std::future::poll_fn(|context| match work {
                Some(work) => work.poll_unpin(context),
                None => std::task::Poll::Pending,
            });
            tokio::select! {
                message = self.messages.recv() => match message {
                    Ok(message) => {
                        let news = message.value.as_bytes().map(News::read);
                        if let Some(Ok(news)) = news {
                            return Some(FeedEvent::News(message.channel.to_string(), news));
                        }
                    }
                    Err(RecvError::Lagged(_)) => return Some(FeedEvent::Gap),
                    Err(RecvError::Closed) => return None,
                },
                reconnect = self.reconnects.recv() => {
                    if reconnect == Err(RecvError::Closed) {
                        return None;
                    }
                    // What was under way concerned another connection.
                    self.misses = 0;
                    self.subscribe();
                }
                done = done => {
                    self.work = None;
                    match done {
                        Done::Subscribed(true) => return Some(FeedEvent::Gap),
                        Done::Subscribed(false) => self.incomplete = true,
                        Done::Asked(true) => self.misses = 0,
                        Done::Asked(false) => self.missed(),
                    }
                }
                _ = self.beat.tick() => self.on_beat(),
            }
        }
    }

    /// Begins to subscribe to everything.
    fn subscribe(&mut self) {
        self.incomplete = false;
        let all = subscribed(self.client.clone(), self.sharded, self.channels.clone());
        self.work = Some(all.map(Done::Subscribed).boxed());
    }

    fn on_beat(&mut self) {
        if self.runner.has_ended() {
            self.runner.reconnect(&self.client);
            return;
        }
        // Without a connection there is nothing to ask: the next one is told about.
        if self.work.is_some() || !self.client.is_connected() {
            return;
        }
        if self.incomplete {
            self.subscribe();
        } else if self.sharded {
            let count = self.channels.len();
            let some = (0..count.min(RENEWED)).filter_map(|ahead| self.channels.get((self.turn + ahead) % count));
            let renewed = subscribed(self.client.clone(), true, some.cloned().collect());
            self.turn = (self.turn + RENEWED) % count.max(1);
            self.work = Some(renewed.map(Done::Asked).boxed());
        } else {
            self.work = Some(answers(self.client.clone()).map(Done::Asked).boxed());
        }
    }

    fn missed(&mut self) {
        self.misses += 1;
        self.incomplete |= self.sharded;
        if self.misses >= MISSES {
            self.misses = 0;
            tracing::debug!("the connection for announcements is silent: making another one");
            self.runner.reconnect(&self.client);
        }
    }

    /// Ends the connection and its task.
    pub async fn close(&mut self) {
        let _ = tokio::time::timeout(Duration::from_millis(500), self.client.quit()).await;
    }
}

/// Subscribes; true when all went well. Outside of a cluster that only means that it was sent.
async fn subscribed(client: Client, sharded: bool, channels: Vec<String>) -> bool {
    for channel in channels {
        let subscribed = async {
            if sharded {
                client.ssubscribe(Key::from(channel)).await
            } else {
                client.subscribe(Key::from(channel)).await
            }
        };
        let subscribed: Result<Result<(), Error>, _> = tokio::time::timeout(ANSWER, subscribed).await;
        if !matches!(subscribed, Ok(Ok(()))) {
            return false;
        }
    }
    true
}

/// The server answers.
async fn answers(client: Client) -> bool {
    let ping = CustomCommand::new_static("PING", ClusterHash::FirstKey, false);
    client.with_options(&options(ANSWER)).custom::<Value, Value>(ping, Vec::new()).await.is_ok()
}
