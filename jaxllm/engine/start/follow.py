"""A process that follows process 0: the same start as an engine's, and then the steps that come."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from jaxllm import compat, machine
from jaxllm.config import EngineConfig
from jaxllm.engine.scale.lockstep.follower import Follower
from jaxllm.engine.scale.lockstep.meeting import Group
from jaxllm.engine.scale.lockstep.messages import BEAT_SECONDS, Follows
from jaxllm.engine.start.agreement import join_group
from jaxllm.engine.start.build import closing_at_failure, find_model, gather_weights, load_weights, plan_and_compile
from jaxllm.engine.start.leave import die, leave
from jaxllm.engine.start.prepared import Clock, new_follower
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.engine.start.weight_cache import identity, last_kept
from jaxllm.errors import ConfigError, EngineDeadError, JaxLLMError, one_line
from jaxllm.weights.folder import reading_ahead

logger = logging.getLogger(__name__)
LOST_SECONDS = 2 * BEAT_SECONDS
"""How long a process whose step has failed waits for process 0 to say, or show, that the group was over before."""


@compat.under_own_settings
def follow(
    config: EngineConfig,
    on_group: Callable[[Group], None] = lambda group: None,
    on_ready: Callable[[], None] = lambda: None,
    end: Callable[[str], NoReturn] = die,
) -> NoReturn:
    """Follow process 0 until it ends the group; the process ends with it.

    `on_group` is called when all processes have come, `on_ready` when this one can run steps, and `end` with a reason
    where the group is over for one: it ends the process, in any thread.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: what is wrong before the processes have joined.
    """
    machine.use_threads(config.threads)
    clock = Clock()
    path = find_model(config, clock)
    files = identity([path])
    with reading_ahead(last_kept(config, files) or path):
        checkpoint = open_model(config, path)
        group = join_group(config, path, end, on_group)
        assert isinstance(group.hold, Follower)
        try:
            clock.lap("the other processes")
            prepared = plan_and_compile(config, checkpoint, files, group, clock)
            with closing_at_failure(prepared):
                weights = load_weights(prepared)
                device = new_follower(prepared, weights)
                gather_weights(prepared, weights)
            checkpoint.close()
            group.hold.say(Follows())
            on_ready()
            logger.info("follows process 0: %s", clock)
            for stage in prepared.stages:
                stage.executables.announce_end()
            reason = group.hold.follow(device)
        except EngineDeadError as error:
            end(str(error))
        except Exception as error:
            end(_failure(group.hold, error))
    if reason:
        end(reason)
    compat.leave_processes()
    logger.info("process 0 has ended the group")
    leave(0)


def _failure(hold: Follower, error: Exception) -> str:
    """The reason why this process cannot go on; process 0 has been told, which tells the requests."""
    if lost := hold.lost(LOST_SECONDS):  # a step that others run no more fails here too
        return lost
    said = str(error) if isinstance(error, JaxLLMError) else f"{type(error).__name__}: {one_line(error)}"
    if not isinstance(error, ConfigError):
        logger.error("this process cannot go on", exc_info=error)
    try:
        hold.fail(said)
    except EngineDeadError:
        said += "; process 0 is gone too"
    return said
