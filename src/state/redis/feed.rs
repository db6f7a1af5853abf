//! The announcements of the ledgers, on a connection of their own.

use std::fmt;
use std::time::Duration;

use fred::clients::Client;
use fred::error::Error;
use fred::interfaces::{ClientLike, EventInterface, PubsubInterface};
use fred::types::config::Server;
use fred::types::{Key, Message};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::{RedisConfig, RedisError};
use crate::state::keys::ModelKeys;
use crate::state::wire::News;

/// What a [`NewsFeed`] brings.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedEvent {
    /// An announcement on a channel.
    News(String, News),
    /// Announcements may have been missed.
    Gap,
}

/// The announcements of some models' ledgers, on a connection of its own.
pub struct NewsFeed {
    client: Client,
    channels: Vec<String>,
    sharded: bool,
    messages: Receiver<Message>,
    reconnects: Receiver<Server>,
}

impl fmt::Debug for NewsFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewsFeed").field("channels", &self.channels.len()).finish_non_exhaustive()
    }
}

impl NewsFeed {
    /// Begins to connect, and does not wait for that.
    pub fn connect(config: &RedisConfig) -> Result<NewsFeed, RedisError> {
        let client = config.client()?;
        let (messages, reconnects) = (client.message_rx(), client.reconnect_rx());
        drop(client.connect());
        Ok(NewsFeed { client, channels: Vec::new(), sharded: config.is_cluster(), messages, reconnects })
    }

    /// Listens to these models from now on, besides those before.
    pub async fn add<'a>(&mut self, models: impl Iterator<Item = &'a ModelKeys>) {
        let fresh: Vec<String> =
            models.map(|keys| keys.news().to_owned()).filter(|channel| !self.channels.contains(channel)).collect();
        // What fails now is asked for again after the next reconnect.
        let _ = self.subscribe(&fresh).await;
        self.channels.extend(fresh);
    }

    async fn subscribe(&self, channels: &[String]) -> Result<(), Error> {
        for channel in channels {
            if self.sharded {
                self.client.ssubscribe(Key::from(channel)).await?;
            } else {
                self.client.subscribe(Key::from(channel)).await?;
            }
        }
        Ok(())
    }

    /// Waits for the next event; `None` when the feed was closed. May be dropped while it waits.
    pub async fn next(&mut self) -> Option<FeedEvent> {
        loop {
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
                    let _ = self.subscribe(&self.channels).await;
                    return Some(FeedEvent::Gap);
                }
            }
        }
    }

    /// Ends the connection and its task.
    pub async fn close(&self) {
        let _ = tokio::time::timeout(Duration::from_millis(500), self.client.quit()).await;
    }
}
