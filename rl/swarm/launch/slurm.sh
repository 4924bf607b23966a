#!/bin/bash
#SBATCH --job-name={{ plan.workdir.name|sbatch }}
#SBATCH --nodes={{ plan.hosts + own|length }}
#SBATCH --ntasks-per-node=1
#SBATCH --output={{ plan.workdir|string|replace("%", "%%")|sbatch }}/launch/%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}
# Written by `python -m rl.launch --target=slurm`. A learner that gets SIGTERM saves; requeued, the job goes on from its checkpoint.
cd {{ root|string|quote }}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
{% for name, _ in others %}
{{ name }}=${nodes[{{ plan.hosts + own.index(name) if name in own else 0 }}]}
{% endfor %}
learner=${nodes[0]}
on() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" {{ python|quote }} -m "${@:2}"; }
keep() { until on "$@"; do sleep 5; done; } # a process that dies starts again
{% for name, command in others %}
keep "${{ name }}" {{ command }} &
{% endfor %}
srun --overlap --nodes={{ plan.hosts }} --ntasks={{ plan.hosts }} --nodelist="$(IFS=,; echo "${nodes[*]:0:{{ plan.hosts }}}")" {{ python|quote }} -m {{ learner }}
code=$?
trap '' TERM
kill 0 # the others end with the learner
[ $code = 143 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
