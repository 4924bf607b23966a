from ml_collections import config_dict as config_dict
from ml_collections import config_flags as config_flags
