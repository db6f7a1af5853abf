//! Work that survives its client for a while: real engines look for disconnects only now and then.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::state::Core;

/// `work`, which goes on for `lag` after the returned future was dropped. `None` when the engine died meanwhile. Without a
/// lag it is simply the work itself, cancelled together with its connection.
pub(crate) fn lingering<T: Send + 'static>(
    core: &Arc<Core>,
    lag: Duration,
    work: BoxFuture<'static, T>,
) -> BoxFuture<'static, Option<T>> {
    if lag.is_zero() {
        return work.map(Some).boxed();
    }
    let stop = core.ending.kill.child_token();
    let (sender, receiver) = oneshot::channel();
    let task = {
        let stop = stop.clone();
        async move {
            // A result that nobody waits for any more is lost on purpose.
            let _ = stop.run_until_cancelled(async move { sender.send(work.await) }).await;
        }
    };
    core.tasks.spawn_on(task, &core.runtime);
    let grace = Grace { core: core.clone(), stop, lag };
    async move {
        let result = receiver.await.ok();
        grace.stop.cancel();
        result
    }
    .boxed()
}

/// Ends the work some time after its drop.
struct Grace {
    core: Arc<Core>,
    stop: CancellationToken,
    lag: Duration,
}

impl Drop for Grace {
    fn drop(&mut self) {
        let (stop, lag) = (self.stop.clone(), self.lag);
        let wait = async move {
            let _ = stop.clone().run_until_cancelled(tokio::time::sleep(lag)).await;
            stop.cancel();
        };
        self.core.tasks.spawn_on(wait, &self.core.runtime);
    }
}
