"""What follows a step, decided alike on all drafters: report, evaluation round, gates, checkpoint,
and whether all ranks stop."""

import logging
import math
from dataclasses import asdict

from dflashdist.cluster.workqueue import Dispatcher, WorkQueue
from dflashdist.cluster.world import World
from dflashdist.config import dump_config
from dflashdist.model.drafter import Drafter
from dflashdist.train.drafter_loop import RunFailed, Training, TrainState
from dflashdist.train.evaluation import Best, Evaluator, RoundLog
from dflashdist.train.gates import RAW
from dflashdist.train.metrics import Reporter, StepSums, summary
from dflashdist.train.resume import Start, versions

log = logging.getLogger(__name__)


class AfterStep:
    """What `drafter_loop.train` calls after each step."""

    def __init__(
        self,
        begun: Start,
        world: World,
        drafter: Drafter,
        evaluator: Evaluator | None,
        lead: tuple[Dispatcher, WorkQueue] | None,
    ) -> None:
        """`evaluator`: where the run has rounds of evaluation. `lead`: rank 0's of a split job."""
        self._begun, self._job, self._world, self._drafter = begun, begun.job, world, drafter
        self._evaluator, self._lead = evaluator, lead
        self._reporter: Reporter | None = None
        self._rounds: RoundLog | None = None
        self._saved = "saved/none"
        if world.rank == 0:
            self._reporter = Reporter(
                begun.job.plan,
                begun.job.steps,
                first_step=begun.step,
                tensorboard=str(begun.folder / "tb"),
                every=begun.job.config.train.log_every,
            )
            if evaluator:
                to_come = begun.step + (not begun.round_first)
                self._rounds = RoundLog(begun.folder / "eval/rounds.jsonl", to_come)

    def start(self, training: Training, state: TrainState) -> None:
        """Before the first step: save the untrained drafter if asked to, and make up for the round
        that was due where the last run was stopped."""
        if self._job.config.checkpoint.at_start and state.step == 0:
            self.save(training, state)
        if self._begun.round_first:
            _, violated = self.evaluate(training, state)
            self.save(training, state)
            self._fail(violated if self._job.config.gates_stop else [])

    def __call__(
        self, training: Training, state: TrainState, sums: StepSums, rate: float, norm: float
    ) -> bool:
        """Report, evaluate and save where it is time. Returns whether all ranks stop now."""
        config = self._job.config
        self._report(state, sums, rate, norm)
        violated = []
        if config.gates:
            known = summary([sums], training.plan) | {"lr": rate, "grad_norm": norm}
            known |= {"skipped_steps": state.skipped, "empty_micro_batches": state.empty}
            violated = self._check_gates(state.step, known)
        stop = sums.extra("stop") > 0
        last = state.step == training.steps.num_steps
        best = False
        if self._job.stream.due(state.step) and not stop:  # else when the run goes on
            best, more = self.evaluate(training, state)
            best, violated = best and config.evaluate.keep_best, violated + more
        failed = violated if config.gates_stop else []
        if failed or stop or last or best or state.step % config.checkpoint.every == 0:
            self.save(training, state)
        self._fail(failed)
        if stop and self._world.rank == 0:
            log.warning("asked to stop: saved after step %d; train.resume=auto goes on", state.step)
        return stop

    def _report(self, state: TrainState, sums: StepSums, rate: float, norm: float) -> None:
        if not self._reporter:
            return
        depth = None
        if self._lead:
            dispatcher, queue = self._lead
            depth = dispatcher.num_published - queue.num_consumed()
        self._reporter.step(
            state.step,
            sums,
            lr=rate,
            grad_norm=norm,
            skipped=state.skipped,
            empty=state.empty,
            queue_depth=depth,
            beats=self._world.health.beats,
        )

    def evaluate(self, training: Training, state: TrainState) -> tuple[bool, list[str]]:
        """The round of this step. Returns whether it is the best so far, and gates violated."""
        stream = self._job.stream
        assert self._evaluator and stream.rounds
        values = self._evaluator.round(state.step)
        training.clock.leave_out(values[f"{RAW}/seconds"])
        state.evaluated = state.step
        length = values.get(f"{RAW}/acceptance_length", math.nan)
        best = length > (state.best.acceptance_length if state.best else 0.0)
        if best:
            assert self._job.measured_on
            state.best = Best(state.step, length, self._job.measured_on)
        if self._reporter and self._rounds:
            self._reporter.evaluation(state.step, values, best)
            self._rounds.add(state.step, values, {"best": best})
        return best, self._check_gates(state.step, values)

    def _check_gates(self, step: int, values: dict[str, float]) -> list[str]:
        """What to say of the gates that are violated now, in tensorboard too; in the log only where
        the run goes on."""
        violated = self._job.gates.violated(step, values)
        for text in violated:
            if self._reporter:
                self._reporter.warning(step, text)
            if not self._job.config.gates_stop:
                log.warning("%s", text)
        return violated

    def _fail(self, violated: list[str]) -> None:
        """Raises RunFailed, on all drafters, if there is a gate to end the run for."""
        if violated:
            self.close()
            raise RunFailed(
                f"{'; '.join(violated)} (gates_stop=true); this step is saved, to be looked at"
            )

    def save(self, training: Training, state: TrainState) -> None:
        """The lead writes; the others wait for it, so that nobody takes the pause for a fault."""
        key = f"saved/{state.step}"
        if self._world.rank != 0:
            training.health.phase("wait for the checkpoint")
            training.health.wait_key(self._world.store, key)
            return
        training.health.phase("save the checkpoint", kind=state.step)
        config, checkpoints = self._job.config, self._begun.checkpoints
        facts = self._begun.facts() | {
            "cursor": min(state.step * training.steps.window, training.steps.end),
            "skipped": state.skipped,
            "bad_in_a_row": state.bad_in_a_row,
            "empty": state.empty,
            "evaluated": state.evaluated,
            "best": asdict(state.best) if state.best else None,
            "kept": sorted(checkpoints.kept),
            "num_steps": training.steps.num_steps,
            "config": dump_config(config),
            "versions": versions(),
        }
        if state.best and config.evaluate.keep_best:
            checkpoints.best = state.best.step
        place = checkpoints.save(
            state.step, self._drafter, training.optimizer, facts, training.average
        )
        log.info("saved %s", place)
        self._world.store.set(key, "1")
        self._world.store.delete_key(self._saved)  # all have read it: a step was reduced since
        self._saved = key

    def close(self) -> None:
        """Write what the reporter still holds."""
        if self._reporter:
            self._reporter.close()
