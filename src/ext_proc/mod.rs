//! The Envoy adapter: `envoy.service.ext_proc.v3.ExternalProcessor`. Protobuf in, protobuf out; no routing knowledge.
//!
//! Supported processing mode: request headers SEND, request body BUFFERED (or BUFFERED_PARTIAL), response headers
//! SEND, response body STREAMED (or NONE: outcome and usage are then unknown). Any other request-body mode would let
//! a request go on before it is routed, so it is refused with a text that says so.
//!
//! All knowledge of `envoy-types` is in this module.

mod convert;
mod peer;
mod reply;

use std::sync::Arc;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::drive::Driver;
use peer::EnvoyPeer;

/// Replies waiting for Envoy to read them. Envoy has one message outstanding at a time, so this never fills.
const REPLY_QUEUE: usize = 8;

/// The gRPC service.
#[derive(Debug, Clone)]
pub struct Processor {
    driver: Arc<Driver>,
}

impl Processor {
    /// The service, with messages up to the configured size both ways.
    pub fn service(driver: Arc<Driver>) -> ExternalProcessorServer<Processor> {
        let limits = &driver.world().knobs.limits;
        let incoming = limits.max_grpc_message_bytes;
        // A routed body is the client's with a hand-off in it: a limit that the client's body just met would fail the
        // request after its prefill leg.
        let outgoing = incoming.saturating_add(limits.max_prefill_answer_bytes);
        ExternalProcessorServer::new(Processor { driver })
            .max_decoding_message_size(incoming)
            .max_encoding_message_size(outgoing)
    }
}

#[tonic::async_trait]
impl ExternalProcessor for Processor {
    type ProcessStream = ReceiverStream<Result<ProcessingResponse, Status>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let (replies, stream) = mpsc::channel(REPLY_QUEUE);
        let (metadata, _, messages) = request.into_parts();
        let metadata = metadata.into_headers();
        let peer = EnvoyPeer::new(messages, replies);
        self.driver.spawn(peer, metadata);
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}
