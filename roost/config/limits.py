"""How large a job may be: beyond any cluster there is, yet small enough that a slip of the pen cannot fill memory."""

MAX_NODES = 1_048_576
MAX_ACCELERATORS_PER_NODE = 1_024
MAX_ACCELERATORS = 8_388_608
MAX_PROCESSES = 4_194_304  # of one component
MAX_COMPONENTS = 500
