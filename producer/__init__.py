"""Submit generation jobs and read their results: the side of headrace that needs no torch."""

from headrace.producer.aio import AsyncBatch, AsyncJob, AsyncProducer
from headrace.producer.batches import Progress
from headrace.producer.client import Batch, Job, Producer
from headrace.producer.retry import Retried
from headrace.producer.status import BatchStatus, QueueStatus, ServerStatus, WorkerStatus
from headrace.shared.errors import (
    BatchExists,
    BatchNotFound,
    DuplicateIds,
    HeadraceError,
    InputError,
    InvalidRequest,
    JobNotFound,
    ResultTimeout,
    ServerUnavailable,
    SettingsError,
)
from headrace.shared.schema import (
    ErrorCode,
    ErrorInfo,
    FinishReason,
    Message,
    Output,
    Request,
    Result,
    Timing,
    Usage,
)

__all__ = [
    "AsyncBatch",
    "AsyncJob",
    "AsyncProducer",
    "Batch",
    "BatchExists",
    "BatchNotFound",
    "BatchStatus",
    "DuplicateIds",
    "ErrorCode",
    "ErrorInfo",
    "FinishReason",
    "HeadraceError",
    "InputError",
    "InvalidRequest",
    "Job",
    "JobNotFound",
    "Message",
    "Output",
    "Producer",
    "Progress",
    "QueueStatus",
    "Request",
    "Result",
    "ResultTimeout",
    "Retried",
    "ServerStatus",
    "ServerUnavailable",
    "SettingsError",
    "Timing",
    "Usage",
    "WorkerStatus",
]
