"""vLLM's model runner V2 on a machine without a GPU, and a look at what it computes.

V2's Triton kernels run in Triton's interpreter, in place of a backend of Triton for the CPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tests.vllm.names import parent_of

if TYPE_CHECKING:
    from tests.vllm.engine import Engine

# Whether engines run V2 unless a test says otherwise; asked once, for vLLM looks at Triton once.
RUNS_V2 = os.environ.get("KVTRIE_VLLM_V2") == "1"


def interpret() -> None:
    """Make Triton's interpreter run kernels; call this before anything imports vLLM."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton import backends  # noqa: PLC0415 - it reads the environment
    from triton.backends.driver import DriverBase  # noqa: PLC0415

    class Driver(DriverBase):
        """What vLLM asks of a backend, and the interpreter does not."""

        @classmethod
        def is_active(cls) -> bool:
            return False

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError(ty)

        def get_current_target(self) -> Any:
            raise NotImplementedError

        def get_active_torch_device(self) -> Any:
            import torch  # noqa: PLC0415

            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

    backends.backends.clear()
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Driver)


def keep_steps_in_flight() -> None:
    """Make the CPU backend schedule asynchronously where that is configured, as GPUs do."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415 - after `interpret`

    update = CpuPlatform.check_and_update_config.__func__

    def updating(cls: type, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(updating)


def watch(engine: Engine) -> None:
    """Fail a step in which the runner computes other tokens than the scheduler believes."""
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    if not hasattr(runner, "req_states"):
        return
    size, requests = engine.scheduler.block_size, engine.scheduler.requests
    get_blocks = engine.scheduler.kv_cache_manager.get_block_ids
    execute = runner.execute_model

    def executing(output: Any, *rest: Any, **more: Any) -> Any:
        done = execute(output, *rest, **more)
        if output.total_num_scheduled_tokens:
            _check(output)
        return done

    def _check(output: Any) -> None:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        assert starts.keys() == output.num_scheduled_tokens.keys()
        batch = runner.execute_model_state.input_batch
        edges = batch.query_start_loc_np.tolist()
        for at, name in enumerate(batch.req_ids):
            begin, end = edges[at], edges[at + 1]
            first = int(batch.positions[begin])
            # With drafts in flight, the scheduler counts what may be rejected.
            drafts = output.scheduled_spec_decode_tokens
            if not drafts and not runner.num_speculative_steps:
                assert first == starts[name], (name, first, starts[name])
            wanted = list(range(first, first + output.num_scheduled_tokens[name]))
            assert batch.positions[begin:end].tolist() == wanted
            parent = name if name in requests else parent_of(name)
            request = requests[parent]
            known = request._all_token_ids
            for offset, token in enumerate(batch.input_ids[begin:end].tolist()):
                if first + offset < len(known):
                    assert token == known[first + offset], (name, first + offset)
            blocks = get_blocks(parent)[0]
            row = runner.block_tables.block_tables[0].gpu[batch.idx_mapping_np[at]]
            used = -(-(first + end - begin) // size)
            assert row[:used].tolist() == blocks[:used], (name, row[:used], blocks[:used])
            assert int(batch.seq_lens[at]) == first + end - begin

    runner.execute_model = executing
