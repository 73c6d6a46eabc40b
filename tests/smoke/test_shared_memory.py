"""/dev/shm in use: does it hold what DataLoader workers hand to their rank?"""

from conftest import Step, last_json

from muster import size


def test_dataloader_shm(step: Step, python: str) -> None:
    """A worker hands one sample of 80 MiB over."""
    done = step.run([python, "dataloader_shm.py"])
    if done.timed_out or done.returncode:
        step.fail(
            what=f"a DataLoader worker could not hand a sample over /dev/shm ({done.ending})",
            evidence="\n".join(done.last_lines(5)),
            cause="/dev/shm is smaller than what the workers hold in it (Docker's own is 64 MiB)",
            remedy="give the container more: --shm-size 1g, or --ipc=host; in a pod a"
            " memory-backed emptyDir at /dev/shm",
        )
    result = last_json(done.output)
    step.measure(
        f"{size.binary(result['sample_bytes'])} through {size.binary(result['shm_bytes'])}"
    )
